/* The passes of modulo quantization over memory, block by block while it is in the nearest cache: what EagerPasses
 * in eager_passes.py makes, bit for bit. Powers of two scale exactly, and nothing is contracted or reassociated but integers.
 *
 * Rows are ranks, num_rows of them, row_... apart. A message is the codes of its blocks, their checksums
 * (int32) and their levels (int16); it is read and written as Layout in lattice.py says.
 */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK_NUMEL 4096 /* the largest block */
#define LEVELS_PER_OCTAVE 8
#define FINEST (-100 * LEVELS_PER_OCTAVE)
#define COARSEST (100 * LEVELS_PER_OCTAVE)
#define RAW INT16_MIN
#define LARGEST_EXPONENT 22 /* of integers on the lattice */
#define LARGEST_INTEGER (1 << LARGEST_EXPONENT)
#define MAX_SHIFT 20
#define PATIENCE 1

/* Each function once for any processor, and again for those with wider registers: chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__gnu_linux__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 6)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINED static inline __attribute__((always_inline))

typedef struct {
    int64_t num_blocks, block_numel, bits;
} Layout;

typedef struct {
    int32_t *checksums;
    int16_t *levels;
    uint8_t *codes;
} Fields;

INLINED Fields fields_of(const Layout *layout, uint8_t *message) {
    int64_t num_codes = layout->num_blocks * layout->block_numel * layout->bits / 8;
    Fields fields = {
        (int32_t *)(message + num_codes),
        (int16_t *)(message + num_codes + 4 * layout->num_blocks),
        message,
    };
    return fields;
}

INLINED int16_t within_levels(int level) {
    return (int16_t)(level < FINEST ? FINEST : level > COARSEST ? COARSEST : level);
}

INLINED int exponent_of(int level) { return (level + LEVELS_PER_OCTAVE - 1) >> 3; }

INLINED float power_of_two(int exponent) {
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* The smallest level of a lattice constant that is not below size; eighths are those of an octave from a half on. */
INLINED int16_t level_of(double size, const double *eighths) {
    int exponent, number = 0;
    if (!(size > 0x1p-100)) return FINEST;
    if (size > 0x1p100) return COARSEST;
    double mantissa = frexp(size, &exponent);
    while (number < LEVELS_PER_OCTAVE && mantissa > eighths[number]) number++;
    return within_levels((exponent - 1) * LEVELS_PER_OCTAVE + number);
}

/* Subtract codes of 8 bits; the sum of weights times differences, and the largest of these. */
INLINED int32_t subtract(
    const uint8_t *own,
    const uint8_t *peer,
    const int32_t *weights,
    int64_t numel,
    int8_t *restrict differences,
    int *peak
) {
    uint32_t checksum = 0;
    int8_t largest = INT8_MIN, smallest = INT8_MAX;
    for (int64_t i = 0; i < numel; i++) {
        int8_t difference = (int8_t)(uint8_t)(peer[i] - own[i]);
        differences[i] = difference;
        largest = difference > largest ? difference : largest;
        smallest = difference < smallest ? difference : smallest;
        checksum += (uint32_t)weights[i] * (uint32_t)(int32_t)difference;
    }
    *peak = largest > -smallest ? largest : -smallest;
    return (int32_t)checksum;
}

/* 16 times the differences of codes of 4 bits, two in a byte; the first half of the block first. */
INLINED void subtract_halves(const uint8_t *own, const uint8_t *peer, int64_t half, uint8_t *restrict differences) {
    for (int64_t i = 0; i < half; i++) {
        uint8_t both = (uint8_t)(peer[i] - own[i]), low = (uint8_t)(both << 4);
        differences[i] = low;
        differences[half + i] = (uint8_t)(both - (uint8_t)((int8_t)low >> 4));
    }
}

INLINED void shift(const uint8_t *codes, int octaves, int64_t num_bytes, uint8_t *restrict shifted) {
    for (int64_t i = 0; i < num_bytes; i++) shifted[i] = (uint8_t)((uint32_t)codes[i] << octaves);
}

/* See EagerPasses.check. */
FOR_EACH_PROCESSOR void lattice_check(
    const Layout *layout,
    int64_t num_rows,
    uint8_t *own_messages,
    int64_t own_row,
    uint8_t *peer_messages,
    int64_t peer_row,
    const int32_t *weights,
    double spread,
    const double *eighths,
    int8_t *differences,
    int64_t differences_row,
    uint8_t *resent,
    double *sizes,
    int16_t *wanted
) {
    int64_t num_blocks = layout->num_blocks, block_numel = layout->block_numel;
    int64_t code_bytes = block_numel * layout->bits / 8;
    int unit = layout->bits == 8 ? 1 : 16;
    for (int64_t row = 0; row < num_rows; row++) {
        Fields own = fields_of(layout, own_messages + row * own_row);
        Fields peer = fields_of(layout, peer_messages + row * peer_row);
        for (int64_t block = 0; block < num_blocks; block++) {
            static const uint8_t zeros[BLOCK_NUMEL];
            uint8_t shifted[2][BLOCK_NUMEL], unpacked[BLOCK_NUMEL];
            int8_t subtracted[BLOCK_NUMEL];
            const uint8_t *left = own.codes + block * code_bytes, *right = peer.codes + block * code_bytes;
            int own_level = own.levels[block], peer_level = peer.levels[block];
            int finer = own_level < peer_level ? own_level : peer_level;
            int coarser = own_level < peer_level ? peer_level : own_level;
            int is_raw = finer == RAW;
            int exponent = is_raw ? 0 : exponent_of(finer);
            int own_shift = is_raw ? 0 : exponent_of(own_level) - exponent;
            int peer_shift = is_raw ? 0 : exponent_of(peer_level) - exponent;
            int fits = !is_raw && own_shift <= MAX_SHIFT && peer_shift <= MAX_SHIFT;
            int peak;
            own_shift = own_shift > MAX_SHIFT ? MAX_SHIFT : own_shift;
            peer_shift = peer_shift > MAX_SHIFT ? MAX_SHIFT : peer_shift;
            if (own_shift) shift(left, own_shift, code_bytes, shifted[0]), left = shifted[0];
            if (peer_shift) shift(right, peer_shift, code_bytes, shifted[1]), right = shifted[1];
            if (layout->bits == 4) {
                subtract_halves(left, right, code_bytes, unpacked);
                left = zeros, right = unpacked;
            }
            int32_t checksum = subtract(left, right, weights, block_numel, subtracted, &peak);
            memcpy(differences + row * differences_row + block * block_numel, subtracted, (size_t)block_numel);
            uint32_t expected = ((uint32_t)peer.checksums[block] << peer_shift)
                                - ((uint32_t)own.checksums[block] << own_shift);
            fits &= checksum == (int32_t)(expected * (uint32_t)unit);
            double size = power_of_two(exponent);
            int64_t place = row * num_blocks + block;
            resent[place] = !fits;
            sizes[place] = size;
            if (coarser != RAW && wanted[place] < within_levels(coarser - PATIENCE))
                wanted[place] = within_levels(coarser - PATIENCE);
            if (fits) {
                int16_t level = level_of(spread * (peak / unit * size), eighths);
                if (wanted[place] < level) wanted[place] = level;
            }
        }
    }
}

#define REAL float
#define SIGNED int32_t
#define FLOOR floorf
#define NAMED(name) name##_float
#include "lattice_passes.c"
#undef REAL
#undef SIGNED
#undef FLOOR
#undef NAMED
#define REAL double
#define SIGNED int64_t
#define FLOOR floor
#define NAMED(name) name##_double
#include "lattice_passes.c"

#else

/* The largest magnitude; NaN where there is one: as integers, magnitudes are in the same order, and NaN comes last. */
INLINED REAL NAMED(peak_of)(const REAL *values, int64_t numel) {
    SIGNED largest = 0;
    for (int64_t i = 0; i < numel; i++) {
        SIGNED bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= (SIGNED)((~(uint64_t)0) >> (65 - 8 * sizeof bits));
        largest = bits > largest ? bits : largest;
    }
    REAL peak;
    memcpy(&peak, &largest, sizeof peak);
    return peak;
}

/* Round one block to its lattice, in codes of 8 bits; the sum of weights times integers. */
INLINED int32_t NAMED(encode)(
    const REAL *values,
    const float *noise,
    const int32_t *weights,
    int64_t numel,
    REAL inverse,
    REAL size,
    REAL *restrict points,
    uint8_t *restrict codes
) {
    uint32_t checksum = 0;
    for (int64_t i = 0; i < numel; i++) {
        REAL rounded = FLOOR((REAL)noise[i] + values[i] * inverse);
        int32_t integer = (int32_t)rounded;
        points[i] = rounded * size;
        codes[i] = (uint8_t)integer;
        checksum += (uint32_t)weights[i] * (uint32_t)integer;
    }
    return (int32_t)checksum;
}

/* See EagerPasses.encode: blocks of numel values, the last of which may be shorter. */
FOR_EACH_PROCESSOR void NAMED(lattice_encode)(
    const Layout *layout,
    int64_t num_rows,
    const REAL *values,
    int64_t values_row,
    int64_t numel,
    int64_t first_block,
    const int16_t *wanted,
    const float *noise,
    const int64_t *offsets,
    int64_t offset_numel,
    const int32_t *weights,
    REAL *points,
    uint8_t *messages,
    int64_t messages_row
) {
    int64_t num_blocks = layout->num_blocks, block_numel = layout->block_numel;
    int64_t code_bytes = block_numel * layout->bits / 8;
    int64_t last_block = first_block + (numel + block_numel - 1) / block_numel;
    for (int64_t row = 0; row < num_rows; row++) {
        Fields fields = fields_of(layout, messages + row * messages_row);
        for (int64_t block = first_block; block < last_block; block++) {
            REAL filled_up[BLOCK_NUMEL];
            int64_t place = row * num_blocks + block, start = (block - first_block) * block_numel;
            const REAL *part = values + row * values_row + start;
            REAL *block_points = points + place * block_numel;
            uint8_t *codes = fields.codes + block * code_bytes;
            if (numel - start < block_numel) {
                memset(filled_up, 0, sizeof filled_up);
                memcpy(filled_up, part, (size_t)(numel - start) * sizeof *part);
                part = filled_up;
            }

            /* The level that is wanted, or a coarser one where points would not be representable. */
            REAL peak = NAMED(peak_of)(part, block_numel);
            int level = wanted[place];
            if (!(peak <= LARGEST_INTEGER * power_of_two(exponent_of(level < FINEST ? FINEST : level)))) {
                if (level != RAW && isfinite(peak)) {
                    int exponent;
                    frexp((double)peak, &exponent);
                    level = (exponent - LARGEST_EXPONENT) * LEVELS_PER_OCTAVE;
                    level = level < FINEST ? FINEST : level > COARSEST ? RAW : level;
                } else {
                    level = RAW;
                }
            }
            fields.levels[block] = (int16_t)level;
            if (level == RAW) {
                memcpy(block_points, part, (size_t)block_numel * sizeof *part);
                memset(codes, 0, (size_t)code_bytes);
                fields.checksums[block] = 0;
                continue;
            }

            int64_t number = block * block_numel;
            const float *some_noise = noise + offsets[number / offset_numel] + number % offset_numel;
            REAL size = power_of_two(exponent_of(level)), inverse = power_of_two(-exponent_of(level));
            uint8_t wide[BLOCK_NUMEL];
            uint8_t *all = layout->bits == 8 ? codes : wide;
            fields.checksums[block] =
                NAMED(encode)(part, some_noise, weights, block_numel, inverse, size, block_points, all);
            /* Of 4 bits, those of the first half of the block as they are and of the second times 16. */
            for (int64_t i = 0; layout->bits == 4 && i < code_bytes; i++)
                codes[i] = (uint8_t)(wide[i] + 16 * wide[code_bytes + i]);
        }
    }
}

/* Add differences times their scale to what is there, or else to nothing. */
INLINED void NAMED(add)(const int8_t *differences, REAL scale, int is_first, int64_t numel, REAL *restrict total) {
    if (is_first)
        for (int64_t i = 0; i < numel; i++) total[i] = (REAL)differences[i] * scale;
    else
        for (int64_t i = 0; i < numel; i++) total[i] += (REAL)differences[i] * scale;
}

/* total = sum over reads of differences times scales, of some blocks. */
FOR_EACH_PROCESSOR void NAMED(lattice_decode)(
    const Layout *layout,
    int64_t num_rows,
    int64_t first_block,
    int64_t last_block,
    int64_t num_reads,
    const int8_t *const *differences,
    int64_t differences_row,
    const REAL *const *scales,
    REAL *total
) {
    int64_t num_blocks = layout->num_blocks, block_numel = layout->block_numel;
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t block = first_block; block < last_block; block++) {
            for (int64_t read = 0; read < num_reads; read++) {
                const int8_t *some = differences[read] + row * differences_row + block * block_numel;
                NAMED(add)(some, scales[read][row * num_blocks + block], read == 0, block_numel, total);
            }
            total += block_numel;
        }
    }
}

#endif

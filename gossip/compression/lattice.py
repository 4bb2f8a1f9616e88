"""The arithmetic of modulo quantization, block by block: eager in the cache of a CPU, compiled on other devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from loguru import logger

from gossip.compression.conversation import CHUNK_NUMEL, Parts
from gossip.compression.part_memory import scratch

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_NUMEL = 4096
LEVELS_PER_OCTAVE = 8
FINEST, COARSEST = -100 * LEVELS_PER_OCTAVE, 100 * LEVELS_PER_OCTAVE
RAW = -(2**15)
"""In place of a level: the block is not on a lattice, and is to be asked for in full."""
LARGEST_INTEGER = 2**22
"""So many steps of the lattice from zero, and float32 does not hold its points any more."""
NOISE_PERIOD = 2**18
_MAX_SHIFT = 20  # between the lattices of two peers; further apart they are as good as unknown to each other


def exponents(levels: torch.Tensor) -> torch.Tensor:
    """Binary logarithm of the lattice constants, int32: the levels rounded up to whole octaves."""
    return (levels.to(torch.int32) + (LEVELS_PER_OCTAVE - 1)) >> int(math.log2(LEVELS_PER_OCTAVE))


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Exactly, in float32, of int32 between -126 and 127."""
    return ((exponents + 127) * 2**23).view(torch.float32)


class LatticeKernels:
    """Passes over the blocks of one bucket, for one width of code on one device.

    All tensors may have leading dimensions, which are ranks: so few that they fit the cache of a CPU together.

    Parameters
    ----------
    bits : int
    device : torch.device
    """

    def __init__(self, bits: int, device: torch.device) -> None:
        self.bits = bits
        self.device = device
        source = torch.Generator().manual_seed(0x6C617474696365)
        # Each number of a grid once: from a random place on, every value of it is as likely, and neighbours are alike
        # in nothing.
        grid = (torch.randperm(NOISE_PERIOD, generator=source) + 0.5) / NOISE_PERIOD
        self._noise = torch.cat([grid, grid[:CHUNK_NUMEL]]).to(device)
        weights = torch.randint(-(2**30), 2**30, (BLOCK_NUMEL,), generator=source, dtype=torch.int32)
        self._weights = (2 * weights + 1).to(device)
        self._encode, self._scale = (_compiled(kernel, device) for kernel in (_encode_blocks, _scale))

    def peaks(self, values: torch.Tensor, num_blocks: int, block_numel: int) -> torch.Tensor:
        """The largest magnitude in each block, [num_blocks]; NaN where there is one."""
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        found = torch.empty((*values.shape[:-1], num_blocks), dtype=wide, device=self.device)
        for blocks, part in _parts(values, block_numel, fill_up=False):
            torch.maximum(part.amax(-1), part.amin(-1).neg_(), out=found[..., blocks])
        return found

    def encode(
        self,
        values: torch.Tensor,
        levels: torch.Tensor,
        offsets: torch.Tensor,
        points: torch.Tensor,
        codes: torch.Tensor,
        checksums: torch.Tensor,
    ) -> None:
        """Round ``values`` to their lattices.

        Parameters
        ----------
        values : Tensor, [numel]
        levels : Tensor, [num_blocks], int16
        offsets : Tensor, [num_offsets], int64
            Where the noise of each part begins, below ``NOISE_PERIOD``.
        points : Tensor, [num_blocks, block_numel]
            Filled with the lattice points; with the values themselves where the level is RAW.
        codes : Tensor, [num_blocks, bytes], uint8
            Filled with the points' last bits.
        checksums : Tensor, [num_blocks], int32
            Filled with a digest of the points.
        """
        block_numel, dim = points.shape[-1], levels.dim() - 1
        is_raw = levels == RAW
        steps = exponents(levels).masked_fill_(is_raw, 0)
        sizes = power_of_two(steps).to(points.dtype)[..., None]
        inverses = sizes.reciprocal()  # exactly
        weights = self._weights[:block_numel]
        for blocks, part in _parts(values, block_numel):
            noise = self._noise_of(offsets, blocks, block_numel)
            some = (_some(each, blocks, dim) for each in (inverses, sizes))
            out = (_some(each, blocks, dim) for each in (points, codes, checksums))
            self._encode(part, noise, *some, weights, self.bits, *out)
        if self.device.type != "cpu" or bool(is_raw.any()):
            for blocks, part in _parts(values, block_numel):
                chosen = _some(points, blocks, dim)
                chosen.copy_(torch.where(_some(is_raw, blocks, dim)[..., None], part, chosen))

    def num_offsets(self, num_blocks: int, block_numel: int) -> int:
        """How many places of the noise an :meth:`encode` needs."""
        return -(-num_blocks * block_numel // CHUNK_NUMEL)

    def _noise_of(self, offsets: torch.Tensor, blocks: slice, block_numel: int) -> torch.Tensor:
        first, last = blocks.start * block_numel, blocks.stop * block_numel
        if self.device.type == "cpu":
            start = int(offsets[first // CHUNK_NUMEL]) + first % CHUNK_NUMEL
            return self._noise[start : start + last - first].view(-1, block_numel)
        places = torch.arange(first, last, device=self.device)
        return self._noise[offsets[places // CHUNK_NUMEL] + places % CHUNK_NUMEL].view(-1, block_numel)

    def check(
        self,
        own_codes: torch.Tensor,
        own_checksums: torch.Tensor,
        peer_codes: torch.Tensor,
        peer_checksums: torch.Tensor,
        shifts: tuple[torch.Tensor, torch.Tensor] | None,
        differences: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Subtract the codes, and see whether their differences are those of the points.

        Parameters
        ----------
        own_codes, peer_codes : Tensor, [num_blocks, bytes], uint8
            ``peer_codes`` is used up.
        own_checksums, peer_checksums : Tensor, [num_blocks], int32
        shifts : (Tensor, Tensor), each [num_blocks], int32, or None
            How many octaves this rank's lattice, and the peer's, are coarser than the finer of the two; None: they are
            the same.
        differences : Tensor, [num_blocks, block_numel], int8
            Filled with peer_codes - own_codes, in steps of the finer lattice, times 16 if the codes have 4 bits. May be
            the memory of ``peer_codes`` if they have 8.

        Returns
        -------
        fits : Tensor, [num_blocks], bool
        peaks : Tensor, [num_blocks], int32
            The largest difference.
        """
        digests = torch.empty_like(own_checksums)
        largest, smallest = torch.empty((2, *digests.shape), dtype=torch.int8, device=self.device)
        *_, num_blocks, block_numel = differences.shape
        dim = digests.dim() - 1
        weights = self._weights[:block_numel]
        near: torch.Tensor | None = None
        if shifts is not None:
            near = torch.maximum(*shifts) <= _MAX_SHIFT
            own_shifts, peer_shifts = (shift.clamp(max=_MAX_SHIFT) for shift in shifts)
            is_shifted = (own_shifts + peer_shifts).ne(0)
            own_checksums, peer_checksums = own_checksums << own_shifts, peer_checksums << peer_shifts
        for blocks in _block_ranges(num_blocks, block_numel, self.device):
            left, right = _some(own_codes, blocks, dim), _some(peer_codes, blocks, dim)
            if shifts is not None and bool(is_shifted[..., blocks].any()):
                left = (left.to(torch.int32) << own_shifts[..., blocks, None]).to(torch.uint8)
                right = (right.to(torch.int32) << peer_shifts[..., blocks, None]).to(torch.uint8)
            out = (_some(each, blocks, dim) for each in (differences, digests, largest, smallest))
            _subtract_codes(left, right, weights, self.bits, *out)
        unit = self.unit
        fits = digests == (peer_checksums - own_checksums) * unit
        peaks = torch.maximum(largest.to(torch.int32), smallest.to(torch.int32).neg_())
        if unit > 1:
            peaks //= unit
        return fits if near is None else fits & near, peaks

    @property
    def unit(self) -> int:
        """What one step of the lattice is in ``differences``."""
        return 1 if self.bits == 8 else 16

    def decode(self, reads: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> Parts:
        """Yield the sum of differences [num_blocks, block_numel] times scales [num_blocks], some blocks at a time."""
        *leading, num_blocks, block_numel = reads[0][0].shape
        dim = len(leading)
        for blocks in _block_ranges(num_blocks, block_numel, self.device):
            shape = (*leading, blocks.stop - blocks.start, block_numel)
            total = scratch(shape, dtype, self.device)
            for number, (differences, scales) in enumerate(reads):
                some = _some(differences, blocks, dim), _some(scales, blocks, dim)[..., None]
                if number == 0:
                    self._scale(*some, total)
                else:
                    total.add_(some[0] * some[1])
            yield blocks, total


@functools.cache
def kernels(bits: int, device: torch.device) -> LatticeKernels:
    """The ones for this device; they have no state."""
    return LatticeKernels(bits, device)


def _encode_blocks(
    values: torch.Tensor,
    noise: torch.Tensor,
    inverses: torch.Tensor,
    sizes: torch.Tensor,
    weights: torch.Tensor,
    bits: int,
    points: torch.Tensor,
    codes: torch.Tensor,
    checksums: torch.Tensor,
) -> None:
    torch.addcmul(noise.to(values.dtype), values, inverses, out=points).floor_()
    integers = scratch(points.shape, torch.int32, points.device).copy_(points)
    if bits == 8:
        codes.copy_(integers)
    else:
        # Two numbers in a byte, one as it is and one times 16: what the first carries over, a difference takes back.
        low, high = scratch(points.shape, torch.uint8, points.device).copy_(integers).chunk(2, dim=-1)
        torch.add(low, high, alpha=16, out=codes)
    torch.sum(integers.mul_(weights), -1, dtype=torch.int32, out=checksums)
    points.mul_(sizes)


def _subtract_codes(
    own_codes: torch.Tensor,
    peer_codes: torch.Tensor,
    weights: torch.Tensor,
    bits: int,
    differences: torch.Tensor,
    checksums: torch.Tensor,
    largest: torch.Tensor,
    smallest: torch.Tensor,
) -> None:
    if bits == 8:
        torch.sub(peer_codes, own_codes, out=differences.view(torch.uint8))
    else:
        low, high = differences.chunk(2, dim=-1)
        both = torch.sub(peer_codes, own_codes, out=scratch(own_codes.shape, torch.uint8, own_codes.device)).view(
            torch.int8
        )
        torch.mul(both, 16, out=low)
        torch.bitwise_right_shift(low, 4, out=high)
        torch.sub(both, high, out=high)
    torch.amax(differences, -1, out=largest)
    torch.amin(differences, -1, out=smallest)
    integers = scratch(differences.shape, torch.int32, differences.device).copy_(differences)
    torch.sum(integers.mul_(weights), -1, dtype=torch.int32, out=checksums)


def _scale(differences: torch.Tensor, scales: torch.Tensor, total: torch.Tensor) -> None:
    total.copy_(differences).mul_(scales)


def _parts(values: torch.Tensor, block_numel: int, *, fill_up: bool = True) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some blocks of flat values at a time, in the dtype of accumulation; the last block filled up with zeros."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    *leading, numel = values.shape
    num_whole = numel // block_numel
    for blocks in _block_ranges(num_whole, block_numel, values.device):
        part = values[..., blocks.start * block_numel : blocks.stop * block_numel]
        yield blocks, part.to(wide).view(*leading, -1, block_numel)
    if missing := -numel % block_numel:
        rest = (values[..., num_whole * block_numel :] if num_whole else values).to(wide)
        if fill_up:
            rest = torch.constant_pad_nd(rest, (0, missing))
        yield slice(num_whole, num_whole + 1), rest.unsqueeze(-2)


def _block_ranges(num_blocks: int, block_numel: int, device: torch.device) -> list[slice]:
    size = max(1, CHUNK_NUMEL // block_numel) if device.type == "cpu" else max(num_blocks, 1)
    return [slice(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]


def _some(tensor: torch.Tensor, blocks: slice, dim: int) -> torch.Tensor:
    """These blocks, which are dimension ``dim``; often all, and then it takes no view."""
    length = blocks.stop - blocks.start
    return tensor if length == tensor.shape[dim] else tensor.narrow(dim, blocks.start, length)


def _compiled(function: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """On a device other than the CPU, fused into few passes over memory if torch can compile there, else as it is."""
    if device.type == "cpu":
        return function
    compiled = torch.compile(function, dynamic=True)
    works = True

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal works
        if works:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # no Triton, no compiler: whatever stands in the way
                works = False
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                logger.warning("{} runs uncompiled on {}: {}", function.__name__, device, reason)
        return function(*args, **kwargs)

    return run

"""The arithmetic of modulo quantization in torch: eager on a CPU without a compiler, compiled on other devices."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from loguru import logger

from gossip.compression.conversation import CHUNK_NUMEL, Parts, accumulation_dtype
from gossip.compression.lattice import (
    COARSEST,
    FINEST,
    LARGEST_INTEGER,
    LEVELS_PER_OCTAVE,
    MAX_SHIFT,
    PATIENCE,
    RAW,
    Layout,
    exponents,
    levels_of,
    power_of_two,
    tables,
)

P = ParamSpec("P")
T = TypeVar("T")


class EagerPasses:
    """Passes over the blocks of one bucket, on one device.

    All tensors may have a leading dimension, which is ranks.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device

    @property
    def unit(self) -> int:
        """The value of one lattice step in the differences."""
        return 1 if self._layout.bits == 8 else 16

    def encode(
        self,
        values: torch.Tensor,
        wanted: torch.Tensor,
        offsets: torch.Tensor,
        points: torch.Tensor,
        message: torch.Tensor,
    ) -> Iterator[int]:
        """Round ``values`` to lattices of the wanted levels, or of coarser ones where these have no such points.

        Parameters
        ----------
        values : Tensor, [numel]
            The values.
        wanted : Tensor, [num_blocks], int16
            The finest level allowed for each block.
        offsets : Tensor, [num_offsets], int64
            Where the noise of each part begins, below ``NOISE_PERIOD``.
        points : Tensor, [num_blocks, block_numel]
            Filled with the lattice points, or with the values themselves where the level is RAW.
        message : Tensor, [num_bytes], uint8
            Filled with the levels, the last bits of the points, and a digest of the points.

        Yields
        ------
        int
            The number of blocks whose codes are complete.
        """
        fields, blocks = self._layout.fields(message), in_blocks(values, self._layout.block_numel)
        peaks = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())  # NaN where the block has one
        levels = _levels_on_lattice(wanted, peaks)
        fields.levels.copy_(levels)
        is_raw = levels == RAW
        sizes = power_of_two(exponents(levels).masked_fill_(is_raw, 0)).to(points.dtype)[..., None]
        noise, weights = tables(self._device)
        noise = noise.unfold(0, CHUNK_NUMEL, 1)[offsets].flatten()[: self._layout.numel].view(blocks.shape[-2:])
        some_raw = is_raw[..., None] if self._device.type != "cpu" or bool(is_raw.any()) else None
        encode = _compiled(_encode_blocks, self._device)
        inverses = sizes.reciprocal()  # which are exact
        codes, checksums = encode(blocks, noise, inverses, sizes, weights, some_raw, self._layout.bits, points)
        fields.codes.copy_(codes)  # the compiler cannot write into views of bytes
        fields.checksums.copy_(checksums)
        yield self._layout.num_blocks

    def check(
        self, own: torch.Tensor, peers: torch.Tensor, spread: float, differences: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Subtract the codes of two messages, and check whether their differences are those of the points.

        Parameters
        ----------
        own, peers : Tensor, [num_bytes], uint8
            The messages; the codes of ``peers`` are used up.
        spread : float
            The ratio between the constant of a block's next lattice and the block's largest difference.
        differences : Tensor, [num_blocks, block_numel], int8
            Filled with the peer's codes minus this rank's, in steps of the finer lattice, times :attr:`unit`. May share
            memory with the peer's codes if these have 8 bits.
        wanted : Tensor, [num_blocks], int16
            Raised to the levels at which the next message would fit. The lattice follows the largest difference, and
            becomes finer only slowly, equally at both ends of an edge.

        Returns
        -------
        resent : Tensor, [num_blocks], bool
            The blocks whose differences are invalid, which must be requested in full.
        sizes : Tensor, [num_blocks], float64
            The lattice constants of which the differences are multiples.
        """
        sides = [self._layout.fields(message) for message in (own, peers)]
        levels = [side.levels for side in sides]
        coarser, finer = torch.maximum(*levels), torch.minimum(*levels)
        is_raw = finer == RAW
        steps = exponents(finer).masked_fill_(is_raw, 0)
        sizes = power_of_two(steps).double()
        # By how many octaves a lattice is coarser than the finer of the two.
        apart = [(exponents(level) - steps).masked_fill_(is_raw, 0) for level in levels]
        shifts = [shift.clamp(max=MAX_SHIFT) for shift in apart]
        left, right = (side.codes for side in sides)
        if bool(torch.maximum(*shifts).any()):
            left, right = (
                (side.codes.to(torch.int32) << shift[..., None]).to(torch.uint8)
                for side, shift in zip(sides, shifts, strict=True)
            )
        weights = tables(self._device)[1][: self._layout.block_numel]
        digests, peaks = _subtract_codes(left, right, weights, self._layout.bits, differences)
        expected = (sides[1].checksums << shifts[1]) - (sides[0].checksums << shifts[0])
        resent = (digests != expected * self.unit) | (torch.maximum(*apart) > MAX_SHIFT) | is_raw
        slower = (coarser - PATIENCE).clamp_(FINEST, COARSEST).masked_fill_(coarser == RAW, RAW)
        needed = levels_of(spread * (peaks // self.unit * sizes)).masked_fill_(resent, RAW)
        torch.maximum(wanted, torch.maximum(slower, needed), out=wanted)
        return resent, sizes

    def decode(self, reads: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> Parts:
        """Yield the sum of differences [num_blocks, block_numel] times scales [num_blocks], some blocks at a time."""
        (first, scales), *others = reads
        total = torch.empty(first.shape, dtype=dtype, device=self._device)
        _compiled(_scale, self._device)(first, scales[..., None], total)
        for differences, scales in others:
            total.add_(differences * scales[..., None])
        yield slice(0, self._layout.num_blocks), total


def in_blocks(values: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Return flat values as [..., num_blocks, block_numel] in the accumulation dtype, padded with zeros."""
    wide = values.to(accumulation_dtype(values.dtype))
    if missing := -values.shape[-1] % block_numel:
        wide = torch.constant_pad_nd(wide, (0, missing))
    return wide.view(*values.shape[:-1], wide.shape[-1] // block_numel, block_numel)


def _levels_on_lattice(wanted: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the levels, coarser where points would not be representable; RAW where no level is coarse enough."""
    fits = peaks <= LARGEST_INTEGER * power_of_two(exponents(wanted.clamp(min=FINEST)))
    levels = (torch.frexp(peaks).exponent - int(math.log2(LARGEST_INTEGER))) * LEVELS_PER_OCTAVE
    levels = levels.clamp_(FINEST, COARSEST + 1).to(torch.int16)
    levels.masked_fill_((wanted == RAW) | ~torch.isfinite(peaks) | (levels > COARSEST), RAW)
    return torch.where(fits, wanted, levels)


def _encode_blocks(
    values: torch.Tensor,
    noise: torch.Tensor,
    inverses: torch.Tensor,
    sizes: torch.Tensor,
    weights: torch.Tensor,
    is_raw: torch.Tensor | None,
    bits: int,
    points: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill ``points``, and return each block's codes and its checksum, both 0 where it is raw."""
    torch.addcmul(noise.to(values.dtype), values, inverses, out=points).floor_()
    integers = points.to(torch.int32)
    if is_raw is not None:
        integers.masked_fill_(is_raw, 0)
    codes = integers.to(torch.uint8)
    if bits == 4:
        # Two numbers share a byte, one as it is and one times 16; taking a difference undoes the carry of the first.
        low, high = codes.chunk(2, dim=-1)
        codes = torch.add(low, high, alpha=16)
    points.mul_(sizes)
    if is_raw is not None:
        points.copy_(torch.where(is_raw, values, points))
    return codes, torch.sum(integers.mul_(weights[: points.shape[-1]]), -1, dtype=torch.int32)


def _subtract_codes(
    own_codes: torch.Tensor, peer_codes: torch.Tensor, weights: torch.Tensor, bits: int, differences: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill ``differences``, and return each block's checksum and the largest magnitude in it, both int32."""
    if bits == 8:
        torch.sub(peer_codes, own_codes, out=differences.view(torch.uint8))
    else:
        low, high = differences.chunk(2, dim=-1)
        both = torch.sub(peer_codes, own_codes).view(torch.int8)
        torch.mul(both, 16, out=low)
        torch.bitwise_right_shift(low, 4, out=high)
        torch.sub(both, high, out=high)
    peaks = torch.maximum(differences.amax(-1).int(), differences.amin(-1).int().neg_())
    return torch.sum(differences.to(torch.int32).mul_(weights), -1, dtype=torch.int32), peaks


def _scale(differences: torch.Tensor, scales: torch.Tensor, total: torch.Tensor) -> None:
    total.copy_(differences).mul_(scales)


@functools.cache
def _compiled(function: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """Fuse the function on a device other than the CPU if torch can compile there; otherwise return it unchanged."""
    if device.type in ("cpu", "meta"):
        return function
    compiled = torch.compile(function, dynamic=True)
    works = True

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal works
        if works:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # no Triton or no compiler, for example
                works = False
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                logger.warning("{} runs uncompiled on {}: {}", function.__name__, device, reason)
        return function(*args, **kwargs)

    return run

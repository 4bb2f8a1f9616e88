"""The arithmetic of modulo quantization in torch: eager within a CPU's cache, compiled on other devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from loguru import logger

from gossip.compression.conversation import CHUNK_NUMEL, Parts
from gossip.compression.lattice import (
    COARSEST,
    FINEST,
    LARGEST_INTEGER,
    LEVELS_PER_OCTAVE,
    MAX_SHIFT,
    PATIENCE,
    RAW,
    Fields,
    Layout,
    exponents,
    levels_of,
    power_of_two,
    tables,
)
from gossip.compression.part_memory import scratch

P = ParamSpec("P")
T = TypeVar("T")


class EagerPasses:
    """Passes over the blocks of one bucket, on one device.

    All tensors may have a leading dimension, which is ranks: few enough to fit a CPU's cache together.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._noise, self._weights = tables(device)

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
        fields = self._layout.fields(message)
        levels = _levels_on_lattice(wanted, self._peaks(values))
        fields.levels.copy_(levels)
        block_numel, dim = self._layout.block_numel, levels.dim() - 1
        is_raw = levels == RAW
        steps = exponents(levels).masked_fill_(is_raw, 0)
        sizes = power_of_two(steps).to(points.dtype)[..., None]
        inverses = sizes.reciprocal()  # exactly
        weights = self._weights[:block_numel]
        encode = _compiled(_encode_blocks, self._device)
        for blocks, part in _parts(values, block_numel):
            noise = self._noise_of(offsets, blocks)
            some = (_some(each, blocks, dim) for each in (inverses, sizes))
            out = (_some(each, blocks, dim) for each in (points, fields.codes, fields.checksums))
            encode(part, noise, *some, weights, self._layout.bits, *out)
        if self._device.type != "cpu" or bool(is_raw.any()):
            for blocks, part in _parts(values, block_numel):
                chosen = _some(points, blocks, dim)
                chosen.copy_(torch.where(_some(is_raw, blocks, dim)[..., None], part, chosen))
            fields.codes.masked_fill_(is_raw[..., None], 0)
            fields.checksums.masked_fill_(is_raw, 0)
        yield self._layout.num_blocks

    def _peaks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in each block, [num_blocks]; NaN where the block has one."""
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        found = torch.empty((*values.shape[:-1], self._layout.num_blocks), dtype=wide, device=self._device)
        for blocks, part in _parts(values, self._layout.block_numel, fill_up=False):
            torch.maximum(part.amax(-1), part.amin(-1).neg_(), out=found[..., blocks])
        return found

    def _noise_of(self, offsets: torch.Tensor, blocks: slice) -> torch.Tensor:
        block_numel = self._layout.block_numel
        first, last = blocks.start * block_numel, blocks.stop * block_numel
        if self._device.type == "cpu":
            start = int(offsets[first // CHUNK_NUMEL]) + first % CHUNK_NUMEL
            return self._noise[start : start + last - first].view(-1, block_numel)
        places = torch.arange(first, last, device=self._device)
        return self._noise[offsets[places // CHUNK_NUMEL] + places % CHUNK_NUMEL].view(-1, block_numel)

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
        left, right = self._layout.fields(own), self._layout.fields(peers)
        coarser, finer = torch.maximum(left.levels, right.levels), torch.minimum(left.levels, right.levels)
        is_raw = finer == RAW
        steps = exponents(finer).masked_fill_(is_raw, 0)
        shifts = [(exponents(side) - steps).masked_fill_(is_raw, 0) for side in (left.levels, right.levels)]
        slower = (coarser - PATIENCE).clamp_(FINEST, COARSEST).masked_fill_(coarser == RAW, RAW)
        fits, peaks = self._subtract(left, right, shifts, differences)
        resent = fits.logical_not_().logical_or_(is_raw)
        sizes = power_of_two(steps).double()
        needed = levels_of(spread * (peaks * sizes)).masked_fill_(resent, RAW)
        torch.maximum(wanted, torch.maximum(slower, needed), out=wanted)
        return resent, sizes

    def _subtract(
        self,
        own: Fields,
        peers: Fields,
        shifts: Sequence[torch.Tensor],
        differences: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill ``differences``, and return where they match the checksums and the largest of each block.

        The former is [num_blocks], bool, the latter int32. ``shifts`` are the octaves by which this rank's lattice, and
        the peer's, are coarser than the finer of the two, [num_blocks], int32.
        """
        digests = torch.empty_like(own.checksums)
        largest, smallest = torch.empty((2, *digests.shape), dtype=torch.int8, device=self._device)
        num_blocks, block_numel = self._layout.num_blocks, self._layout.block_numel
        dim = digests.dim() - 1
        weights = self._weights[:block_numel]
        near = torch.maximum(*shifts) <= MAX_SHIFT
        own_shifts, peer_shifts = (shift.clamp(max=MAX_SHIFT) for shift in shifts)
        is_shifted = (own_shifts + peer_shifts).ne(0)
        for blocks in block_ranges(num_blocks, block_numel, self._device):
            left, right = _some(own.codes, blocks, dim), _some(peers.codes, blocks, dim)
            if bool(is_shifted[..., blocks].any()):
                left = (left.to(torch.int32) << own_shifts[..., blocks, None]).to(torch.uint8)
                right = (right.to(torch.int32) << peer_shifts[..., blocks, None]).to(torch.uint8)
            out = (_some(each, blocks, dim) for each in (differences, digests, largest, smallest))
            _subtract_codes(left, right, weights, self._layout.bits, *out)
        unit = self.unit
        expected = (peers.checksums << peer_shifts) - (own.checksums << own_shifts)
        fits = (digests == expected * unit) & near
        peaks = torch.maximum(largest.to(torch.int32), smallest.to(torch.int32).neg_())
        if unit > 1:
            peaks //= unit
        return fits, peaks

    def decode(self, reads: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> Parts:
        """Yield the sum of differences [num_blocks, block_numel] times scales [num_blocks], some blocks at a time."""
        num_blocks, block_numel = self._layout.num_blocks, self._layout.block_numel
        leading = reads[0][0].shape[:-2]
        scale = _compiled(_scale, self._device)
        for blocks in block_ranges(num_blocks, block_numel, self._device):
            total = scratch((*leading, blocks.stop - blocks.start, block_numel), dtype, self._device)
            for number, (differences, scales) in enumerate(reads):
                some = _some(differences, blocks, len(leading)), _some(scales, blocks, len(leading))[..., None]
                if number == 0:
                    scale(*some, total)
                else:
                    total.add_(some[0] * some[1])
            yield blocks, total


def largest_distances(values: torch.Tensor, start: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Return the largest distance of ``values`` [..., numel] from ``start`` [numel] in each block, [..., num_blocks].

    It is NaN where the block has one, and in the dtype of ``start``.
    """
    found = []
    for blocks, part in _parts(values, block_numel, fill_up=False):
        first, shape = blocks.start * block_numel, part.shape[-2:]
        found.append((part - start[first : first + shape.numel()].view(shape)).abs_().amax(-1))
    return torch.cat(found, -1)


def _levels_on_lattice(wanted: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the levels, coarser where points would not be representable; RAW where no level is coarse enough."""
    fits = peaks <= LARGEST_INTEGER * power_of_two(exponents(wanted.clamp(min=FINEST)))
    if peaks.is_cpu and bool(fits.all()):
        return wanted  # the usual case
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
        # Two numbers share a byte, one as it is and one times 16; taking a difference undoes the carry of the first.
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
    """Yield some blocks of flat values at a time, in the accumulation dtype, the last block padded with zeros."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    *leading, numel = values.shape
    num_whole = numel // block_numel
    for blocks in block_ranges(num_whole, block_numel, values.device):
        part = values[..., blocks.start * block_numel : blocks.stop * block_numel]
        yield blocks, part.to(wide).view(*leading, -1, block_numel)
    if missing := -numel % block_numel:
        rest = (values[..., num_whole * block_numel :] if num_whole else values).to(wide)
        if fill_up:
            rest = torch.constant_pad_nd(rest, (0, missing))
        yield slice(num_whole, num_whole + 1), rest.unsqueeze(-2)


def block_ranges(num_blocks: int, block_numel: int, device: torch.device) -> list[slice]:
    """Return the ranges of blocks that are processed at a time."""
    size = max(1, CHUNK_NUMEL // block_numel) if device.type == "cpu" else max(num_blocks, 1)
    return [slice(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]


def _some(tensor: torch.Tensor, blocks: slice, dim: int) -> torch.Tensor:
    """Select these blocks along dimension ``dim``, without a view in the usual case that they are all blocks."""
    length = blocks.stop - blocks.start
    return tensor if length == tensor.shape[dim] else tensor.narrow(dim, blocks.start, length)


@functools.cache
def _compiled(function: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """Fuse the function on a device other than the CPU if torch can compile there; otherwise return it unchanged."""
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
            except Exception as error:  # no Triton or no compiler, for example
                works = False
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                logger.warning("{} runs uncompiled on {}: {}", function.__name__, device, reason)
        return function(*args, **kwargs)

    return run

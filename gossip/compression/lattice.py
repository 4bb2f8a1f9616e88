"""The lattices of modulo quantization: levels, noise, and the layout of the messages."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gossip.compression.conversation import CHUNK_NUMEL

BLOCK_NUMEL = 4096
LEVELS_PER_OCTAVE = 8
FINEST, COARSEST = -100 * LEVELS_PER_OCTAVE, 100 * LEVELS_PER_OCTAVE
RAW = -(2**15)
"""Stands in place of a level: the block is not on a lattice, and must be requested in full."""
LARGEST_INTEGER = 2**22
"""The number of lattice steps from zero beyond which float32 does not hold the points exactly."""
NOISE_PERIOD = 2**18
MAX_SHIFT = 20
"""The largest distance in octaves between the lattices of two peers at which they can still be compared."""
PATIENCE = 1
"""How many levels finer the lattice may become from one exchange to the next."""


def exponents(levels: torch.Tensor) -> torch.Tensor:
    """Return the binary logarithm of the lattice constants, int32: the levels rounded up to whole octaves."""
    return (levels.to(torch.int32) + (LEVELS_PER_OCTAVE - 1)) >> int(math.log2(LEVELS_PER_OCTAVE))


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the exact power of two, in float32, of int32 exponents from -126 to 127."""
    return ((exponents + 127) * 2**23).view(torch.float32)


def levels_of(sizes: torch.Tensor) -> torch.Tensor:
    """Return the finest levels, int16, not finer than ``sizes``, float64; by comparison, equal on every machine."""
    lowest, highest = (2.0 ** (level // LEVELS_PER_OCTAVE) for level in (FINEST, COARSEST))
    mantissas, octaves = torch.frexp(sizes.nan_to_num(nan=0.0).clamp_(lowest, highest))
    return ((octaves - 1) * LEVELS_PER_OCTAVE + torch.bucketize(mantissas, eighths(sizes.device))).to(torch.int16)


@functools.cache
def eighths(device: torch.device) -> torch.Tensor:
    """Return the levels of an octave that begins at one half, [LEVELS_PER_OCTAVE], float64."""
    powers = [2 ** (level / LEVELS_PER_OCTAVE - 1) for level in range(LEVELS_PER_OCTAVE)]
    return torch.tensor(powers, dtype=torch.float64, device=device)


@functools.cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random numbers that are equal on every rank: noise and weights.

    Noise, [NOISE_PERIOD + CHUNK_NUMEL], float32, has each number of a grid once: from a random place on, every value is
    equally likely, and neighbouring values are independent of each other. Weights, [BLOCK_NUMEL], int32, are odd
    factors by which checksums multiply integers.
    """
    source = torch.Generator().manual_seed(0x6C617474696365)
    grid = (torch.randperm(NOISE_PERIOD, generator=source) + 0.5) / NOISE_PERIOD
    noise = torch.cat([grid, grid[:CHUNK_NUMEL]]).to(device)
    weights = torch.randint(-(2**30), 2**30, (BLOCK_NUMEL,), generator=source, dtype=torch.int32)
    return noise, (2 * weights + 1).to(device)


class Fields(NamedTuple):
    """The parts of one message, or of several ranks' messages if tensors have a leading dimension.

    Attributes
    ----------
    checksums : Tensor, [num_blocks], int32
        The digests of the points.
    levels : Tensor, [num_blocks], int16
        The lattice of each block.
    codes : Tensor, [num_blocks, code_bytes], uint8
        The last bits of the points.
    """

    checksums: torch.Tensor
    levels: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The layout of a message: codes, checksums, levels.

    Attributes
    ----------
    num_blocks, block_numel : int
        The number of blocks, and of values in each.
    bits : int
        The size of a code, 8 or 4.
    """

    num_blocks: int
    block_numel: int
    bits: int

    @classmethod
    def of(cls, numel: int, bits: int) -> Layout:
        """Return the layout for ``numel`` values; a small bucket is a single small block."""
        block_numel = min(BLOCK_NUMEL, max(16, -(-numel // 16) * 16))
        return cls(-(-numel // block_numel), block_numel, bits)

    @property
    def numel(self) -> int:
        """The number of values, including the padding of the last block."""
        return self.num_blocks * self.block_numel

    @property
    def code_bytes(self) -> int:
        """The number of bytes for the codes of one block."""
        return self.block_numel * self.bits // 8

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the whole message."""
        return self.num_blocks * (4 + 2 + self.code_bytes)

    @property
    def num_offsets(self) -> int:
        """The number of places in the noise from which an encoding starts."""
        return -(-self.numel // CHUNK_NUMEL)

    def fields(self, message: torch.Tensor) -> Fields:
        """Return the parts of a message, [..., num_bytes] or longer, as views."""
        after_codes = self.num_blocks * self.code_bytes
        after_checksums = after_codes + 4 * self.num_blocks
        return Fields(
            message[..., after_codes:after_checksums].view(torch.int32),
            message[..., after_checksums : self.num_bytes].view(torch.int16),
            self.codes(message),
        )

    def codes(self, message: torch.Tensor) -> torch.Tensor:
        """Return the codes of a message, [..., num_blocks, code_bytes], as a view."""
        codes = message[..., : self.num_blocks * self.code_bytes]
        return codes.view(*message.shape[:-1], self.num_blocks, self.code_bytes)

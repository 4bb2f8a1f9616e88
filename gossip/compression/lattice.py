"""The lattices of modulo quantization: levels, noise, and the messages that say where values lie on them."""

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
"""In place of a level: the block is not on a lattice, and is to be asked for in full."""
LARGEST_INTEGER = 2**22
"""So many steps of the lattice from zero, and float32 does not hold its points any more."""
NOISE_PERIOD = 2**18
MAX_SHIFT = 20
"""Octaves between the lattices of two peers; further apart they are as good as unknown to each other."""
PATIENCE = 1
"""In levels: how much finer the lattice may get from one exchange to the next."""


def exponents(levels: torch.Tensor) -> torch.Tensor:
    """Binary logarithm of the lattice constants, int32: the levels rounded up to whole octaves."""
    return (levels.to(torch.int32) + (LEVELS_PER_OCTAVE - 1)) >> int(math.log2(LEVELS_PER_OCTAVE))


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Exactly, in float32, of int32 between -126 and 127."""
    return ((exponents + 127) * 2**23).view(torch.float32)


def levels_of(sizes: torch.Tensor) -> torch.Tensor:
    """The finest levels, int16, that are not finer than ``sizes``, float64: by comparing, alike on every machine."""
    lowest, highest = (2.0 ** (level // LEVELS_PER_OCTAVE) for level in (FINEST, COARSEST))
    mantissas, octaves = torch.frexp(sizes.nan_to_num(nan=0.0).clamp_(lowest, highest))
    return ((octaves - 1) * LEVELS_PER_OCTAVE + torch.bucketize(mantissas, eighths(sizes.device))).to(torch.int16)


@functools.cache
def eighths(device: torch.device) -> torch.Tensor:
    """Those of an octave that begins at a half, [LEVELS_PER_OCTAVE], float64."""
    powers = [2 ** (level / LEVELS_PER_OCTAVE - 1) for level in range(LEVELS_PER_OCTAVE)]
    return torch.tensor(powers, dtype=torch.float64, device=device)


class Tables(NamedTuple):
    """Random numbers that are the same on every rank.

    Attributes
    ----------
    noise : Tensor, [NOISE_PERIOD + CHUNK_NUMEL], float32
        Each number of a grid once: from a random place on, every value of it is as likely, and neighbours are alike in
        nothing.
    weights : Tensor, [BLOCK_NUMEL], int32
        Odd; what checksums multiply integers by.
    """

    noise: torch.Tensor
    weights: torch.Tensor


@functools.cache
def tables(device: torch.device) -> Tables:
    """In the memory of this device."""
    source = torch.Generator().manual_seed(0x6C617474696365)
    grid = (torch.randperm(NOISE_PERIOD, generator=source) + 0.5) / NOISE_PERIOD
    noise = torch.cat([grid, grid[:CHUNK_NUMEL]]).to(device)
    weights = torch.randint(-(2**30), 2**30, (BLOCK_NUMEL,), generator=source, dtype=torch.int32)
    return Tables(noise, (2 * weights + 1).to(device))


class Fields(NamedTuple):
    """The parts of one message, or of several ranks' where tensors have a leading dimension.

    Attributes
    ----------
    checksums : Tensor, [num_blocks], int32
    levels : Tensor, [num_blocks], int16
    codes : Tensor, [num_blocks, code_bytes], uint8
    """

    checksums: torch.Tensor
    levels: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Where things stand in a message: codes, checksums, levels.

    Attributes
    ----------
    num_blocks, block_numel : int
    bits : int
        Of a code: 8 or 4.
    """

    num_blocks: int
    block_numel: int
    bits: int

    @classmethod
    def of(cls, numel: int, bits: int) -> Layout:
        """For so many values; small buckets are one small block."""
        block_numel = min(BLOCK_NUMEL, max(16, -(-numel // 16) * 16))
        return cls(-(-numel // block_numel), block_numel, bits)

    @property
    def numel(self) -> int:
        """Values, the last block filled up."""
        return self.num_blocks * self.block_numel

    @property
    def code_bytes(self) -> int:
        """Of one block."""
        return self.block_numel * self.bits // 8

    @property
    def num_bytes(self) -> int:
        """Of the whole message."""
        return self.num_blocks * (4 + 2 + self.code_bytes)

    @property
    def num_offsets(self) -> int:
        """How many places of the noise an encoding begins at."""
        return -(-self.numel // CHUNK_NUMEL)

    def fields(self, message: torch.Tensor) -> Fields:
        """The parts of a message, [..., num_bytes] or longer; views."""
        after_codes = self.num_blocks * self.code_bytes
        after_checksums = after_codes + 4 * self.num_blocks
        return Fields(
            message[..., after_codes:after_checksums].view(torch.int32),
            message[..., after_checksums : self.num_bytes].view(torch.int16),
            self.codes(message),
        )

    def codes(self, message: torch.Tensor) -> torch.Tensor:
        """Those of a message, [..., num_blocks, code_bytes]; a view."""
        codes = message[..., : self.num_blocks * self.code_bytes]
        return codes.view(*message.shape[:-1], self.num_blocks, self.code_bytes)

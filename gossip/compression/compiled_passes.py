"""The arithmetic of modulo quantization in C, in a single pass over memory, where it was built on installation."""

import ctypes
import functools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from gossip.compression.conversation import CHUNK_NUMEL, Parts, scratch
from gossip.compression.eager_passes import EagerPasses
from gossip.compression.lattice import Layout, eighths, tables

_REALS = {torch.float32: "float", torch.float64: "double"}


def passes(layout: Layout, device: torch.device) -> EagerPasses:
    """Return the fastest passes available; all produce the same bits."""
    library = _library() if device.type == "cpu" else None
    return EagerPasses(layout, device) if library is None else CompiledPasses(layout, library)


def quantized_by() -> str:
    """Return what quantizes buckets in host memory here, "C" or "torch", for records."""
    return "torch" if _library() is None else "C"


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled ``lattice_passes.c``, or None, with a warning, if it was not compiled."""
    path = Path(__file__).with_name(f"lattice_passes{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning(
            "int8 and int4 run uncompiled, a few times slower, with the same results: {}; install a C compiler (gcc), "
            "then reinstall this package",
            error,
        )
        return None
    return library


class CompiledPasses(EagerPasses):
    """The same as :class:`EagerPasses`, bit for bit, in host memory.

    Each pass is one call that releases Python's lock. It works on a block while the block is in the nearest cache.
    """

    def __init__(self, layout: Layout, library: ctypes.CDLL) -> None:
        super().__init__(layout, torch.device("cpu"))
        self._numbers = (c_int64 * 3)(layout.num_blocks, layout.block_numel, layout.bits)
        self._encode = {dtype: library[f"lattice_encode_{real}"] for dtype, real in _REALS.items()}
        self._check = library["lattice_check"]
        self._decode = {dtype: library[f"lattice_decode_{real}"] for dtype, real in _REALS.items()}

    def encode(
        self,
        values: torch.Tensor,
        wanted: torch.Tensor,
        offsets: torch.Tensor,
        points: torch.Tensor,
        message: torch.Tensor,
    ) -> Iterator[int]:
        block_numel, numel = self._layout.block_numel, values.shape[-1]
        num_rows, row = _rows(message)
        size = max(1, CHUNK_NUMEL // block_numel) * block_numel
        noise, weights = tables(self._device)
        made = (wanted, noise, offsets, CHUNK_NUMEL, weights, points, message, row)
        for start in range(0, numel, size):
            part = values[..., start : start + size].to(points.dtype).contiguous()
            length, first = part.shape[-1], start // block_numel
            _call(self._encode[points.dtype], self._numbers, num_rows, part, length, length, first, *made)
            yield -(-min(start + size, numel) // block_numel)

    def check(
        self, own: torch.Tensor, peers: torch.Tensor, spread: float, differences: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, own_row = _rows(own)
        resent = torch.empty(wanted.shape, dtype=torch.bool)
        sizes = torch.empty(wanted.shape, dtype=torch.float64)
        messages = own, own_row, peers, _rows(peers)[1]
        found = differences, _rows(differences, 3)[1], resent, sizes, wanted
        constants = tables(self._device)[1], spread, eighths(self._device)
        _call(self._check, self._numbers, num_rows, *messages, *constants, *found)
        return resent, sizes

    def decode(self, reads: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> Parts:
        first = reads[0][0]
        leading, (num_rows, row) = first.shape[:-2], _rows(first, 3)
        differences, scales = (
            (c_void_p * len(reads))(*(tensor.data_ptr() for tensor in tensors)) for tensors in zip(*reads, strict=True)
        )
        num_blocks, block_numel = self._layout.num_blocks, self._layout.block_numel
        size = max(1, CHUNK_NUMEL // block_numel)
        for start in range(0, num_blocks, size):
            stop = min(start + size, num_blocks)
            total = scratch((*leading, stop - start, block_numel), dtype, self._device)
            some = start, stop, len(reads)
            _call(self._decode[dtype], self._numbers, num_rows, *some, differences, row, scales, total)
            yield slice(start, stop), total


def _call(function: Callable[..., object], *arguments: Any) -> None:
    function(*map(_as_c, arguments))


def _as_c(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return c_int64(argument)
    return c_double(argument) if isinstance(argument, float) else argument  # an array


def _rows(tensor: torch.Tensor, dim: int = 2) -> tuple[int, int]:
    """Return the number of rows and their distance, for a tensor whose first of ``dim`` dimensions is rows."""
    return (tensor.shape[0], tensor.stride(0)) if tensor.dim() == dim else (1, 0)

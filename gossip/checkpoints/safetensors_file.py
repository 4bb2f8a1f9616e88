"""Files in the safetensors format, written piece by piece: its own library writes only what is in memory as a whole.

A file is the length of its header in 8 bytes, the header in JSON, padded to a multiple of 8, and the values of all
tensors, little-endian and row by row, without gaps (https://huggingface.co/docs/safetensors, section "Format").
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from gossip.checkpoints.checkpoint_files import sync_folder
from gossip.errors import CheckpointError
from gossip.parameters import digests

# In the order of tensors in a file: as the library writes them, the widest first, so that all are aligned.
_NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}


class SafetensorsFile:
    """A file under construction; it takes the place of an older one when it is complete. All methods are local.

    Parameters
    ----------
    path : Path
        The path of the complete file. Until then it is ``.NAME.partial`` in the same folder.
    tensors : mapping of str to Tensor
        Shape and dtype by name of all that will be written; values are not read, so the device "meta" will do.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._tensors, self._metadata = tensors, metadata
        self._starts: dict[str, int] = {}
        self._descriptor: int | None = None

    def begin(self) -> None:
        """Create the file and write its header.

        Raises CheckpointError: the folder does not exist, or the format has no name for the dtype of a tensor; OSError:
        the file cannot be written.
        """
        if not self._path.parent.is_dir():
            raise CheckpointError(f"{self._path.parent} is not a folder; create it first")
        header = self._header()
        self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._put(memoryview(header), 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one of the tensors that were announced, on any device and of any strides, in pieces of up to 16 MiB.

        Raises OSError: the file cannot be written.
        """
        announced = self._tensors[name]
        assert (tensor.shape, tensor.dtype) == (announced.shape, announced.dtype), name
        place = self._starts.pop(name)
        width = tensor.element_size() // (2 if tensor.is_complex() else 1)
        for piece in _pieces(tensor.detach()):
            values = piece.cpu().view(torch.uint8).numpy().view(f"=u{width}").astype(f"<u{width}", copy=False)
            data = values.view(np.uint8).data
            self._put(data, place)
            place += len(data)

    def finish(self) -> None:
        """Flush the file to disk, and give it its name.

        Raises OSError: the file cannot be written. An older file is intact.
        """
        assert self._descriptor is not None
        assert not self._starts, f"{sorted(self._starts)} were not written"
        os.fsync(self._descriptor)
        os.replace(self._partial, self._path)
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Remove an incomplete file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._partial.unlink(missing_ok=True)

    def _header(self) -> bytes:
        """Return length and header, and note where each tensor begins."""
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _NAMES:
                raise CheckpointError(f"{name!r} is {tensor.dtype}, which safetensors files cannot hold; convert it")
        entries: dict[str, object] = {"__metadata__": dict(self._metadata)}
        end = 0
        for name, tensor in sorted(self._tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])):
            start, end = end, end + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape)
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._starts = {name: 8 + len(text) + start for name, start in self._starts.items()}
        return len(text).to_bytes(8, "little") + text

    def _put(self, data: memoryview, place: int) -> None:
        assert self._descriptor is not None
        try:
            while data:
                length = os.pwrite(self._descriptor, data, place)
                data, place = data[length:], place + length
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements row by row, in flat pieces of up to 16 MiB, of which other strides cost a copy each."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(max(1, digests.CHUNK_BYTES // tensor.element_size()))
        return
    num_rows = digests.CHUNK_BYTES // (tensor[0].numel() * tensor.element_size())
    if num_rows == 0:
        for row in tensor:
            yield from _pieces(row)
    else:
        for rows in tensor.split(num_rows):
            yield rows.contiguous().view(-1)

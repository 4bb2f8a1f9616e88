"""Files that are either complete on disk or absent, and that are read only if they hold what was written.

``torch.save`` onto a full disk destroys the file that it overwrites and hides the reason; ``torch.load`` does not
notice a flipped byte. Therefore every file is hashed while it is written, and verified before it is unpickled.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.serialization import config as serialization_config

from gossip.errors import CheckpointError, reason
from gossip.parameters import digests
from gossip.private_torch import tree_leaves

_WRITE_BYTES = 2**25  # of which the disk takes the first part while the next one is written
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


class FileRecord(NamedTuple):
    """The size in bytes that a file must have, and its SHA-256 hash in hexadecimal digits."""

    size: int
    sha256: str


class HashingFile:
    """A new file under construction, written only sequentially.

    The disk begins to take what has been written long before the end, and no page cache is left behind. ``error`` is
    the first that writing raised: torch's own writer hides it behind one of its own.
    """

    def __init__(self, path: Path, releases: Mapping[int, torch.UntypedStorage]) -> None:
        self._releases = releases
        self._written: torch.UntypedStorage | None = None
        self._path = path
        self._hash = hashlib.sha256()
        self._size = self._num_begun = 0
        self.error: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                rest = view
                while rest:
                    rest = rest[os.write(self._descriptor, rest[:_WRITE_BYTES]) :]
                    self._begin_write_back(len(view) - len(rest))
            except OSError as error:
                self.error = OSError(error.errno, error.strerror, str(self._path))
        if self.error is not None:
            raise self.error
        self._hash.update(view)
        self._size += len(view)
        if self._releases and len(view):
            end = np.frombuffer(view, np.uint8).ctypes.data + len(view)
            if (storage := self._releases.get(end)) is not None:
                if self._written is not None:
                    self._written.resize_(0)
                self._written = storage  # torch still reads it after this call
        return len(view)

    def _begin_write_back(self, num_written: int) -> None:
        """Let the disk take what is in the page cache, and drop what it has taken."""
        end = self._size + num_written
        if end - self._num_begun >= _WRITE_BYTES and hasattr(os, "posix_fadvise"):
            start = max(0, self._num_begun - _WRITE_BYTES)  # again what was on its way the last time
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
            self._num_begun = end

    def flush(self) -> None:
        """Do nothing, as nothing is buffered."""

    def finish(self) -> FileRecord:
        """Flush the file to disk and return its record."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        return FileRecord(self._size, self._hash.hexdigest())

    def close(self) -> None:
        os.close(self._descriptor)


def write_file(
    path: Path,
    write: Callable[[HashingFile], object],
    releases: Mapping[int, torch.UntypedStorage] = MappingProxyType({}),
) -> FileRecord:
    """Create ``path`` with what ``write`` writes, and flush it to disk. Local.

    ``releases`` are storages that are given up once they have been written, by the address of their end.

    Raises OSError: the file exists or cannot be written; the error has its path. What has been written is left in
    place.
    """
    file = HashingFile(path, releases)
    try:
        write(file)
        return file.finish()
    except Exception as error:
        if file.error is not None and error is not file.error:
            raise file.error from error
        raise
    finally:
        file.close()


def write_tensors(path: Path, content: Any, *, releases: bool = False) -> FileRecord:
    """Create ``path`` by ``torch.save``, as :func:`write_file` does; the SHA-256 takes the place of CRCs.

    With ``releases`` each tensor, which must have memory of its own, is emptied as soon as it has been written.
    """
    tensors = (leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)) if releases else ()
    storages = (tensor.untyped_storage() for tensor in tensors)
    ends = {storage.data_ptr() + storage.nbytes(): storage for storage in storages if storage.nbytes()}
    with cast(Any, serialization_config).patch("save.compute_crc32", False):
        return write_file(path, lambda file: torch.save(content, cast(IO[bytes], file)), ends)


def read_tensors(path: Path, sha256: str) -> Any:
    """Return, on the CPU, what :func:`write_tensors` wrote. Local.

    Nothing is unpickled before the hash has been verified.

    Raises CheckpointError: the file is missing, has another SHA-256, or holds more than tensors and plain data.
    """
    try:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointError(f"{path} is not what was written: its SHA-256 differs from the manifest's")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        found = re.search(r"(?i)(unsupported [^\n]*?)\.?(\n|$)", str(error))
        what = found[1] if found else reason(error)[:200]
        raise CheckpointError(f"{path} holds something other than tensors and plain data: {what}") from error


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SafetensorsFile:
    """A file in the safetensors format; it takes the place of an older one when it is complete. All methods are local.

    It is written piece by piece: the format's own library writes only what is in memory as a whole. A file is the
    length of its header in 8 bytes, the header in JSON, padded to a multiple of 8, and the values of all tensors,
    little-endian and row by row, without gaps (https://huggingface.co/docs/safetensors, section "Format").

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

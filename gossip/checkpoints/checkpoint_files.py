"""Files that are either complete on disk or absent, and that are read only if they hold what was written.

``torch.save`` onto a full disk destroys the file that it overwrites and hides the reason; ``torch.load`` does not
notice a flipped byte. Therefore every file is hashed while it is written, and verified before it is unpickled.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.serialization import config as serialization_config

from gossip.errors import CheckpointError, reason
from gossip.private_torch import tree_leaves

_WRITE_BYTES = 2**25  # of which the disk takes the first part while the next one is written


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

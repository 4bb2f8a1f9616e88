"""Files that are either complete on disk or absent, and that are read only if they hold what was written.

``torch.save`` onto a full disk destroys the file that it overwrites and hides the reason; ``torch.load`` does not
notice a flipped byte. Therefore every file is hashed while it is written, and verified before it is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from gossip.errors import CheckpointError, reason


class FileRecord(NamedTuple):
    """The size in bytes that a file must have, and its SHA-256 hash in hexadecimal digits."""

    size: int
    sha256: str


class HashingFile:
    """A new file under construction, written only sequentially.

    ``error`` is the first that writing raised: torch's own writer hides it behind one of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                rest = view
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self.error = OSError(error.errno, error.strerror, str(self._path))
        if self.error is not None:
            raise self.error
        self._hash.update(view)
        self._size += len(view)
        return len(view)

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


def write_file(path: Path, write: Callable[[HashingFile], object]) -> FileRecord:
    """Create ``path`` with what ``write`` writes, and flush it to disk. Local.

    Raises OSError: the file exists or cannot be written; the error has its path. What has been written is left in
    place.
    """
    file = HashingFile(path)
    try:
        write(file)
        return file.finish()
    except Exception as error:
        if file.error is not None and error is not file.error:
            raise file.error from error
        raise
    finally:
        file.close()


def write_tensors(path: Path, content: Any) -> FileRecord:
    """Create ``path`` by ``torch.save``, as :func:`write_file` does."""
    return write_file(path, lambda file: torch.save(content, cast(IO[bytes], file)))


def read_tensors(path: Path, record: FileRecord) -> Any:
    """Return, on the CPU, what :func:`write_tensors` wrote. Local.

    Nothing is unpickled before size and hash have been verified.

    Raises CheckpointError: the file is missing, differs from its record, or holds more than tensors and plain data.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise CheckpointError(f"{path} has {size} bytes instead of {record.size}: it was truncated or replaced")
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                raise CheckpointError(f"{path} is not what was written: its SHA-256 differs from the manifest's")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} holds something other than tensors and plain data: {_unpickling(error)}"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unpickling(error: Exception) -> str:
    found = re.search(r"(?i)(unsupported [^\n]*?)\.?(\n|$)", str(error))
    return found[1] if found else reason(error)[:200]

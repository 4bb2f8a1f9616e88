"""The layout of buffers of one process that others on its machine read and mark as read."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from gossip.communication.liveness.process_liveness import namespaces
from gossip.errors import GossipError

BUFFERS_PER_ROW = 3
_ALIGNMENT_BYTES = 64
_LARGE_BYTES = 2**20
_SECRET_BYTES = 16
_MAX_ROWS = 2**16
_order = threading.Lock()


class Address(NamedTuple):
    """Where a process keeps its buffers: a file descriptor, and a secret by which it is known to be that file still."""

    pid: int
    fd: int
    secret: str


class Row(NamedTuple):
    """Some consecutive buffers of an :class:`Arena`."""

    place: int  # the bucket that they serve, plus 1
    start: int  # in the file, a whole number of pages
    nbytes: int  # of a message


class Arena:
    """All buffers of one process, in memory that others map too: an anonymous file, which lasts while anybody holds it.

    A process that knows the arena holds it from the beginning, so what its owner has published is available even after
    the owner's end. It starts with a secret. Then come rows, which are added and never changed; then the buffers. Parts
    that have not been written take no memory. Its descriptor, ``fd``, is closed with this object.

    Attributes
    ----------
    buffers : list of Buffer
        The buffers, as far as they are known here; in the same order in every process.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        self._pid, self._fd = os.getpid(), fd
        self.buffers: list[Buffer] = []
        self._num_readers = num_readers
        self._end = _whole_pages(_SECRET_BYTES)
        rows_bytes = _MAX_ROWS * 8 * len(Row._fields)
        self._numbers = self._map(self._grow(rows_bytes), rows_bytes).cast("q")
        self._num_rows = 0

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a forked child the number may refer to something else by now
            os.close(self._fd)

    @classmethod
    def make(cls, num_readers: int) -> tuple[Arena, Address]:
        """Create the arena of this process."""
        fd, secret = os.memfd_create("gossip"), secrets.token_hex(_SECRET_BYTES // 2)
        os.write(fd, secret.encode())
        return cls(fd, num_readers), Address(os.getpid(), fd, secret)

    @classmethod
    def at(cls, address: Address, num_readers: int) -> Arena | None:
        """Open the arena of another process, or return None if this process cannot read and write it."""
        try:
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
        except OSError:
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            if os.read(fd, _SECRET_BYTES) != address.secret.encode():
                return None
            stack.pop_all()
        return cls(fd, num_readers)

    def _grow(self, nbytes: int) -> int:
        """Add at least ``nbytes`` of memory, and return its start, a whole number of pages."""
        start = self._end
        self._end += _whole_pages(nbytes)
        if os.fstat(self._fd).st_size < self._end:
            os.ftruncate(self._fd, self._end)
        return start

    def _map(self, start: int, nbytes: int) -> memoryview:
        """Map a part of the file that starts at a page."""
        return memoryview(mmap.mmap(self._fd, nbytes, offset=start))

    def add(self, bucket: int, nbytes: int) -> Sequence[Buffer]:
        """Make buffers for messages of ``nbytes``. Called by the owner."""
        if self._num_rows == _MAX_ROWS:
            raise GossipError(
                f"messages of {_MAX_ROWS} different sizes were sent to ranks on this machine, the largest possible "
                "number; a codec whose messages change their size in every step must pad them to a few sizes"
            )
        row = Row(bucket + 1, self._grow(BUFFERS_PER_ROW * self._stride(nbytes)), nbytes)
        buffers = self._buffers(row)
        start = self._num_rows * len(row)
        for number in reversed(range(len(row))):  # a row is complete once its first number is
            keep_order()
            self._numbers[start + number] = row[number]
        self._num_rows += 1
        return buffers

    def new_buffers(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """Yield buckets, and buffers for them that were added since the last call. Called by a reader."""
        while self._num_rows < _MAX_ROWS and self._numbers[start := self._num_rows * len(Row._fields)]:
            keep_order()
            row = Row(*self._numbers[start : start + len(Row._fields)])
            buffers = self._buffers(row)
            self._num_rows += 1
            yield row.place - 1, buffers

    def _buffers(self, row: Row) -> Sequence[Buffer]:
        stride = self._stride(row.nbytes)
        # One mapping for all, because each takes a descriptor.
        memory = self._map(row.start, BUFFERS_PER_ROW * stride)
        starts = range(0, BUFFERS_PER_ROW * stride, stride)
        buffers = [Buffer(memory, start, self._num_readers, row.nbytes) for start in starts]
        self.buffers += buffers
        return buffers

    def _stride(self, nbytes: int) -> int:
        return _whole_pages(_header_bytes(self._num_readers) + nbytes)


class Buffer:
    """Memory for one message, and for which ranks are to read it and which have.

    Parameters
    ----------
    memory : memoryview
        The mapped memory of the buffers of a row; zeros at first.
    start : int
        Where this one begins, a whole number of pages.
    num_readers : int
        The number of ranks that may read it.
    nbytes : int
        The size of the message.

    Attributes
    ----------
    message : Tensor, [nbytes], uint8
        The message.
    """

    def __init__(self, memory: memoryview, start: int, num_readers: int, nbytes: int) -> None:
        header = _header_bytes(num_readers)
        numbers = memory[start : start + 8 * (1 + 2 * num_readers)].cast("q")
        self._time = numbers[:1]
        self._given, self._read = numbers[1 : 1 + num_readers], numbers[1 + num_readers :]
        self.message = torch.frombuffer(memory, dtype=torch.uint8, offset=start + header, count=nbytes)
        assert isinstance(memory.obj, mmap.mmap)
        self._mapped, self._extent = memory.obj, (start, _whole_pages(header + nbytes))

    @property
    def published_at(self) -> float:
        """The time of publication by ``time.perf_counter()``, which is one clock for all processes of a machine."""
        return self._time[0] / 1e9

    def publish(self, numbers: Mapping[int, int]) -> None:
        """Let ranks read it, as their messages with these numbers. Called by the owner."""
        self._time[0] = time.perf_counter_ns()
        keep_order()
        for rank, number in numbers.items():
            self._given[rank] = number

    def holds(self, number: int, rank: int) -> bool:
        """Return whether it holds the message with this number to that rank."""
        is_it = self._given[rank] == number
        keep_order()
        return is_it

    def done(self, rank: int) -> None:
        """Note that the rank has read it; a large message no longer counts as memory of this process."""
        keep_order()
        self._read[rank] = self._given[rank]
        if self.message.nbytes >= _LARGE_BYTES:
            self._mapped.madvise(mmap.MADV_DONTNEED, *self._extent)

    def is_read_by(self, rank: int) -> bool:
        """Return whether the rank has finished reading what it was given last."""
        return self._read[rank] == self._given[rank]

    @property
    def readers(self) -> list[int]:
        """The ranks that have not read it yet."""
        if self._read == self._given:
            return []
        return [rank for rank in range(len(self._given)) if not self.is_read_by(rank)]


def machine() -> list[str | int]:
    """Return a value that is equal in processes that can share memory and are in the same network namespace."""
    return [os.getuid(), *namespaces("net", "pid")]


def keep_order() -> None:
    """Ensure that what was written before is seen before what is written after, and likewise for reads.

    Some processors (ARM) change the order, but not across a lock that is released and acquired.
    """
    for _ in range(2):
        with _order:
            pass


def _header_bytes(num_readers: int) -> int:
    return _whole(8 * (1 + 2 * num_readers), _ALIGNMENT_BYTES)


def _whole_pages(nbytes: int) -> int:
    return _whole(nbytes, mmap.ALLOCATIONGRANULARITY)


def _whole(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit

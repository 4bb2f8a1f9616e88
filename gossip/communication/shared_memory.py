"""Messages between processes of one machine, in memory that the readers read where it is."""

from __future__ import annotations

import collections
import functools
import json
import mmap
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gossip.communication import forks
from gossip.communication.process_states import GONE
from gossip.communication.sockets import with_resending
from gossip.communication.world import World
from gossip.errors import GossipError

_MAX_BUFFERS = 3
_ALIGNMENT_BYTES = 64
_PAUSES_S = 0.00005, 0.0002
_GONE_CHECK_S = 0.005
_SECRET_BYTES = 16
_NUM_ROWS = 2**16


class Directory:
    """Where the buffers of a rank are: a file of rows that are added, and never changed.

    Parameters
    ----------
    fd : int
        Of an anonymous file, which begins with a secret.
    """

    def __init__(self, fd: int) -> None:
        size = _SECRET_BYTES + _NUM_ROWS * 8 * len(Row._fields)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)  # what is not written takes no memory
        self._numbers = memoryview(mmap.mmap(fd, size))[_SECRET_BYTES:].cast("q")
        self._num_rows = 0

    def add(self, row: Row) -> None:
        """Add a row: by the owner."""
        start = self._num_rows * len(row)
        for place in reversed(range(len(row))):  # a row is there once its first number is
            self._numbers[start + place] = row[place]
        self._num_rows += 1

    def new_rows(self) -> Iterator[Row]:
        """Those that were added since the last call."""
        while self._numbers[start := self._num_rows * len(Row._fields)]:
            self._num_rows += 1
            yield Row(*self._numbers[start : start + len(Row._fields)])


class Row(NamedTuple):
    """A buffer in a :class:`Directory`.

    Attributes
    ----------
    place : int
        The bucket, plus 1.
    fd, secret, nbytes : int
    """

    place: int
    fd: int
    secret: int
    nbytes: int


class Buffer:
    """Memory for one message, who shall read it, and who has.

    Parameters
    ----------
    fd : int
        Of an anonymous file, which ends with the last process that has it open or mapped.
    world_size : int
    nbytes : int
        Of the message.

    Attributes
    ----------
    message : Tensor, [nbytes], uint8
    """

    def __init__(self, fd: int, world_size: int, nbytes: int) -> None:
        header = 8 * (2 + 2 * world_size)
        start = -(-header // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = start + nbytes
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        self._numbers = memoryview(memory)[:header].cast("q")
        self._world_size = world_size
        self.message = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes)

    @property
    def secret(self) -> int:
        """Tells whether a descriptor is still what it was."""
        return self._numbers[0]

    @property
    def published_at(self) -> float:
        """``time.perf_counter()``, which is one clock for all processes of a machine."""
        return self._numbers[1] / 1e9

    def name(self, secret: int) -> None:
        """Give it its secret: by the owner, once."""
        self._numbers[0] = secret

    def publish(self, numbers: Mapping[int, int]) -> None:
        """Let ranks read it, as their messages of these numbers: by the owner."""
        self._numbers[1] = time.perf_counter_ns()
        for rank, number in numbers.items():
            self._numbers[2 + rank] = number

    def number_for(self, rank: int) -> int:
        """Which message to that rank it is, or was."""
        return self._numbers[2 + rank]

    def done(self, rank: int) -> None:
        """That rank has read it."""
        self._numbers[2 + self._world_size + rank] = self.number_for(rank)

    def is_read_by(self, rank: int) -> bool:
        """Whether that rank has done with what it was given last."""
        return self._numbers[2 + self._world_size + rank] == self.number_for(rank)


class OwnBuffer:
    """A buffer that this rank fills.

    Attributes
    ----------
    message : Tensor
        Like the messages.
    row : Row
    readers : tuple of int
        Who shall read what is in it.
    """

    def __init__(self, world_size: int, bucket: int, nbytes: int, dtype: torch.dtype) -> None:
        self._pid, self._fd = os.getpid(), os.memfd_create("gossip")
        self._buffer = Buffer(self._fd, world_size, nbytes)
        self.row = Row(bucket + 1, self._fd, secrets.randbits(62), nbytes)
        self._buffer.name(self.row.secret)
        self.message = self._buffer.message.view(dtype)
        self.readers: tuple[int, ...] = ()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a forked child the number may stand for something else by now
            os.close(self._fd)

    def publish(self, numbers: Mapping[int, int]) -> None:
        """Let ranks read it, as their messages of these numbers."""
        self.readers = tuple(numbers)
        self._buffer.publish(numbers)

    def is_read_by(self, reader: int) -> bool:
        """Whether that rank has done with what is in it."""
        return self._buffer.is_read_by(reader)

    @property
    def is_free(self) -> bool:
        """Whether everybody has done with what is in it."""
        return all(map(self.is_read_by, self.readers))


class SharedMessage:
    """Where messages of one bucket of this rank lie, of one size.

    A rank that is ahead need not wait for a peer that still reads: another buffer is made then, up to three. With that
    many, one-peer gossip with delays that are exponentially distributed is within 1 % of what it makes without a limit,
    as a recursion over the times of the steps shows; with two it loses 3 to 5 %, from 4 to 64 ranks.
    """

    def __init__(self, owner: LocalMessages, message: torch.Tensor, bucket: int) -> None:
        self._owner = owner
        self._bucket = bucket
        self._nbytes, self._dtype = message.nbytes, message.dtype
        self._buffers: collections.deque[OwnBuffer] = collections.deque()

    @property
    def message(self) -> torch.Tensor:
        """The buffer taken last."""
        return self._buffers[-1].message

    def take(self, step: int) -> torch.Tensor:
        """A buffer for the message of ``step``, which nobody reads any more.

        Raises
        ------
        ExchangeError
            There is none, in time.
        """
        if len(self._buffers) < _MAX_BUFFERS and not (self._buffers and self._buffers[0].is_free):
            self._buffers.append(self._owner.new_buffer(self._bucket, self._nbytes, self._dtype))
            return self.message
        oldest, world = self._buffers[0], self._owner.world
        for reader in oldest.readers:
            where = f"step {step}, bucket {self._bucket}"
            reading = _BeingRead(oldest, reader)
            failure = world.wait_for(reading, where, functools.partial(list, (reader,)))
            if failure is not None:
                raise world.lost(
                    failure,
                    f"{where}: waited {failure.waited_s:.3g} s in vain for rank {reader} to read the message of "
                    f"{_MAX_BUFFERS} exchanges ago",
                    advice=" (GossipDataParallel's timeout sets how long to wait)",
                )
        self._buffers.rotate(-1)
        return self.message

    def publish(self, readers: Sequence[int]) -> None:
        """Let these ranks read the buffer taken last."""
        self._buffers[-1].publish({reader: self._owner.next_number_to(reader, self._bucket) for reader in readers})


class _Polled(ABC):
    """Something that is looked at again and again until it is so."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.error: Exception | None = None

    @abstractmethod
    def is_so(self) -> bool:
        """Whether it is.

        Raises
        ------
        torch.distributed.DistError, OSError
            It never will be.
        """

    def wait(self, timeout: timedelta) -> bool:
        """Whether it is so, or never will be, within ``timeout``."""
        if os.getpid() != self._pid:
            self.error = GossipError(forks.FORKED)
        start = time.monotonic()
        pause_s, longest_s = _PAUSES_S
        try:
            while self.error is None and not self.is_so():
                if time.monotonic() - start > timeout.total_seconds():
                    return False
                time.sleep(pause_s)
                pause_s = min(1.1 * pause_s, longest_s)
        except (dist.DistError, OSError) as error:
            self.error = error
        return True


class _BeingRead(_Polled):
    """A message of this rank, until a peer has read it."""

    def __init__(self, buffer: OwnBuffer, reader: int) -> None:
        super().__init__()
        self._buffer, self._reader = buffer, reader

    def is_so(self) -> bool:
        return self._buffer.is_read_by(self._reader)


class Reading(_Polled):
    """A message of a peer on this machine, once it is there.

    Parameters
    ----------
    messages : LocalMessages
    source, bucket, number : int
        Which one.
    """

    def __init__(self, messages: LocalMessages, source: int, bucket: int, number: int) -> None:
        super().__init__()
        self._messages = messages
        self._source, self._bucket, self._number = source, bucket, number
        self._buffer: Buffer | None = None
        self._looked_at = time.monotonic()

    def is_so(self) -> bool:
        if self._buffer is None:
            # Looked at in this order: what it has published before its end is there.
            is_gone = time.monotonic() - self._looked_at > _GONE_CHECK_S and self._is_gone()
            self._buffer = self._messages.find(self._source, self._bucket, self._number)
            if self._buffer is None and is_gone:
                raise dist.DistNetworkError(f"the process of rank {self._source} has ended")
        return self.is_found

    @property
    def is_found(self) -> bool:
        """Whether it was there when it was looked for last."""
        return self._buffer is not None

    @property
    def message(self) -> torch.Tensor:
        """What it says, in place, [nbytes], uint8: not to be changed."""
        assert self._buffer is not None
        return self._buffer.message

    @property
    def published_at(self) -> float:
        """When it was made: ``time.perf_counter()``."""
        assert self._buffer is not None
        return self._buffer.published_at

    def done(self) -> None:
        """Tell its owner that this rank has read it."""
        assert self._buffer is not None
        self._buffer.done(self._messages.world.rank)

    def _is_gone(self) -> bool:
        self._looked_at = time.monotonic()
        return self._messages.world.roll_call.state_of(self._source) == GONE


class Readings(_Polled):
    """Messages of peers on this machine that are waited for by the one who needs them: a
    :class:`gossip.communication.device_paths.Pending`.

    Parameters
    ----------
    readings : mapping of str to Reading
        By name.
    then : callable
        Called when all are there.
    """

    def __init__(self, readings: Mapping[str, Reading], then: Callable[[], None]) -> None:
        super().__init__()
        self._readings = readings
        self._then: Callable[[], None] | None = then

    def is_so(self) -> bool:
        return all(reading.is_so() for reading in self._readings.values())

    @property
    def done(self) -> bool:
        """Whether they are there, or never will be. Waits for nothing."""
        return _Polled.wait(self, timedelta())

    @property
    def awaited(self) -> str:
        """The name of the first one that is not there."""
        return next((name for name, reading in self._readings.items() if not reading.is_found), "")

    @property
    def finished_at(self) -> Mapping[str, float]:
        """When they were made, by name."""
        return {name: reading.published_at for name, reading in self._readings.items() if reading.is_found}

    def wait(self, timeout: timedelta) -> bool:
        """Whether they are there, and have been taken in, or never will be, within ``timeout``."""
        if not super().wait(timeout):
            return False
        if self.error is None and self._then is not None:
            then, self._then = self._then, None  # which refers to what holds this
            then()
        return True


class _Arrival(NamedTuple):
    """A reading as an operation of :mod:`gossip.communication.worker_threads`."""

    reading: Reading
    timeout: timedelta

    def wait(self) -> None:
        """Wait until it is there; longer than whoever needs it does.

        Raises
        ------
        Exception
            It never will be.
        """
        if not self.reading.wait(self.timeout):
            raise dist.DistNetworkError("it did not come")
        if self.reading.error is not None:
            raise self.reading.error


class LocalMessages:
    """Which ranks are on this machine, and the messages between them.

    A buffer says which message of its owner to each reader it holds, counted by edge and bucket; a reader looks until
    the one that it needs is there. Nothing goes over a socket for it, and no thread is woken.

    Attributes
    ----------
    world : World
    local : frozenset of int
        Ranks whose memory this one can read, and that can read this one's. Ranks in another network namespace count as
        on another machine: whoever keeps them apart wants their messages on the network.

    Notes
    -----
    Collective: every rank must construct it.
    """

    def __init__(self, world: World, *, shares_memory: bool) -> None:
        self.world = world
        self.local: frozenset[int] = frozenset()
        self._lock = threading.Lock()  # messages are looked for in the training thread and beside it
        self._pid = os.getpid()
        self._fd = os.memfd_create("gossip") if shares_memory and hasattr(os, "memfd_create") else None
        self._seen: list[set[int]] = [set() for _ in range(world.world_size)]
        self._numbers_to: collections.Counter[tuple[int, int]] = collections.Counter()
        self._numbers_from: collections.Counter[tuple[int, int]] = collections.Counter()
        self._buffers: dict[tuple[int, int], list[Buffer]] = collections.defaultdict(list)
        self._rows: dict[tuple[int, int], list[Row]] = collections.defaultdict(list)
        secret = secrets.token_hex(_SECRET_BYTES // 2)
        if self._fd is not None:
            os.write(self._fd, secret.encode())
            self._directory = Directory(self._fd)
        own = [machine() if self._fd is not None else None, self._pid, self._fd, secret]
        everyone = _gather(world, own)
        self._directories = {
            rank: directory
            for rank, (machine, pid, descriptor, text) in enumerate(everyone)
            if machine is not None and machine == own[0] and rank != world.rank
            if (directory := _directory_of(pid, descriptor, text)) is not None
        }
        self._pids = [pid for _, pid, _, _ in everyone]
        machines = [str(machine) for machine, *_ in everyone if machine is not None]
        if len(set(machines)) < len(machines):
            self._seen = [set(ranks) for ranks in _gather(world, list(self._directories))]  # so all ranks know by now
        self.local = frozenset(rank for rank in self._directories if self.are_local((world.rank, rank)))

    def __del__(self) -> None:
        if self._fd is not None and os.getpid() == self._pid:
            os.close(self._fd)

    def are_local(self, ranks: Sequence[int]) -> bool:
        """Whether all of them can read each other's memory; the answer is the same on all ranks."""
        return all(other in self._seen[rank] for rank in ranks for other in ranks if other != rank)

    def new_buffer(self, bucket: int, nbytes: int, dtype: torch.dtype) -> OwnBuffer:
        """Memory for a message of this rank, which the others find."""
        buffer = OwnBuffer(self.world.world_size, bucket, nbytes, dtype)
        self._directory.add(buffer.row)
        return buffer

    def next_number_to(self, reader: int, bucket: int) -> int:
        """Count a message of this rank."""
        self._numbers_to[reader, bucket] += 1
        return self._numbers_to[reader, bucket]

    def arrival(self, reading: Reading) -> _Arrival:
        """What a thread that keeps communication out of the training thread's way can wait for."""
        return _Arrival(reading, with_resending(self.world.timeout))

    def expect(self, source: int, bucket: int) -> Reading:
        """Count a message to this rank."""
        self._numbers_from[source, bucket] += 1
        return Reading(self, source, bucket, self._numbers_from[source, bucket])

    def find(self, source: int, bucket: int, number: int) -> Buffer | None:
        """The buffer in which a message is, if it is there."""
        with self._lock:
            found = self._among(self._buffers[source, bucket], number)
            if found is None:
                for row in self._directories[source].new_rows():
                    self._rows[source, row.place - 1].append(row)
                opened = [self._open(self._pids[source], row) for row in self._rows.pop((source, bucket), ())]
                self._buffers[source, bucket] += opened
                found = self._among(opened, number)
            return found

    def _among(self, buffers: Sequence[Buffer], number: int) -> Buffer | None:
        rank = self.world.rank
        return next((buffer for buffer in buffers if buffer.number_for(rank) == number), None)

    def _open(self, pid: int, row: Row) -> Buffer:
        descriptor = os.open(f"/proc/{pid}/fd/{row.fd}", os.O_RDWR)
        try:
            buffer = Buffer(descriptor, self.world.world_size, row.nbytes)
        finally:
            os.close(descriptor)
        if buffer.secret != row.secret:
            raise OSError(f"descriptor {row.fd} of process {pid} is something else by now")
        return buffer


def _gather(world: World, content: Any) -> list[Any]:
    """Every rank's, by rank. Collective."""
    return [json.loads(data) for data in world.gather_bytes(json.dumps(content).encode(), "finding neighbours")]


def machine() -> list[str | int]:
    """Equal in two processes that can have memory in common, and between which nobody has put a network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.getuid(), *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))]


def _directory_of(pid: int, fd: int, secret: str) -> Directory | None:
    """That of another rank, if this one can read and write it."""
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError:
        return None
    try:
        return Directory(descriptor) if os.read(descriptor, _SECRET_BYTES) == secret.encode() else None
    finally:
        os.close(descriptor)

"""Messages between processes on one machine, in memory that readers read in place."""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from gossip.communication.host import forks
from gossip.communication.host.tcp_options import with_resending
from gossip.communication.liveness.process_liveness import GONE
from gossip.communication.shared_buffers import BUFFERS_PER_ROW, Address, Arena, Buffer, machine
from gossip.communication.world import World
from gossip.errors import GossipError

_PAUSES_S = 0.00005, 0.0002
_GONE_CHECK_S = 0.005


class SharedMessage:
    """The memory for messages of one bucket of this rank, of one size.

    A rank that is ahead need not wait for a peer that is still reading: it takes another buffer, of up to three. With
    three, one-peer gossip with exponentially distributed delays is within 1 % of its speed without a limit, as a
    recursion over the times of the steps shows; with two it loses 3 to 5 %, from 4 to 64 ranks.
    """

    def __init__(self, owner: LocalMessages, message: torch.Tensor, bucket: int) -> None:
        self._owner = owner
        self._bucket = bucket
        self._dtype = message.dtype
        self._unused = collections.deque(owner.new_buffers(bucket, message.nbytes))
        self._used: collections.deque[Buffer] = collections.deque()

    @property
    def message(self) -> torch.Tensor:
        """The buffer that was taken last."""
        return self._used[-1].message.view(self._dtype)

    @property
    def written(self) -> list[torch.Tensor]:
        """The buffers that have been taken so far; the others take no memory."""
        return [buffer.message for buffer in self._used]

    def take(self, where: str) -> torch.Tensor:
        """Return a buffer for a message that nobody reads any more; ``where`` says in error texts what it is for."""
        if self._unused and not (self._used and not self._used[0].readers):
            self._used.append(self._unused.popleft())  # a buffer that was never written takes no memory
            return self.message
        oldest, world = self._used[0], self._owner.world
        for reader in oldest.readers:
            reading = _Polled(functools.partial(oldest.is_read_by, reader))
            if (failure := world.wait_for(reading, where, functools.partial(list, (reader,)))) is not None:
                raise world.lost(
                    failure,
                    f"{where}: {failure.of_waiting} for rank {reader} to read the message of {BUFFERS_PER_ROW} "
                    "exchanges ago",
                    advice=" (GossipDataParallel's timeout sets how long to wait)",
                )
        self._used.rotate(-1)
        return self.message

    def publish(self, readers: Sequence[int]) -> None:
        """Let these ranks read the buffer that was taken last."""
        self._used[-1].publish({reader: self._owner.next_number_to(reader, self._bucket) for reader in readers})


class _Polled:
    """A condition that is polled until it holds, or until it is known, by an error of torch or OSError, never to."""

    def __init__(self, condition: Callable[[], bool] = lambda: True) -> None:
        self._pid = os.getpid()
        self._condition = condition
        self.error: Exception | None = None

    def is_so(self) -> bool:
        return self._condition()

    def wait(self, timeout: timedelta) -> bool:
        """Return whether, within ``timeout``, the condition holds or it is known that it never will."""
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


class Reading(_Polled):
    """A message from a peer on this machine, once it is there."""

    def __init__(self, messages: LocalMessages, source: int, bucket: int, number: int) -> None:
        super().__init__()
        self._messages = messages
        self._source, self._bucket, self._number = source, bucket, number
        self._buffer: Buffer | None = None
        self._looked_at = time.monotonic()

    def is_so(self) -> bool:
        if self._buffer is None:
            # In this order: what the process published before its end is available.
            is_gone = time.monotonic() - self._looked_at > _GONE_CHECK_S and self._is_gone()
            self._buffer = self._messages.find(self._source, self._bucket, self._number)
            if self._buffer is None and is_gone:
                raise dist.DistNetworkError(f"the process of rank {self._source} has ended")
        return self.is_found

    @property
    def is_found(self) -> bool:
        """Whether the message was there when it was last looked for."""
        return self._buffer is not None

    @property
    def buffer(self) -> Buffer:
        """What holds the message, which must not be changed."""
        assert self._buffer is not None
        return self._buffer

    def done(self) -> None:
        """Tell the owner that this rank has read the message."""
        self.buffer.done(self._messages.world.rank)

    def _is_gone(self) -> bool:
        self._looked_at = time.monotonic()
        return self._messages.world.progress_markers.state_of(self._source) == GONE


class Readings(_Polled):
    """Messages from peers on this machine that are polled for by the code that needs them.

    Implements :class:`gossip.communication.device_paths.Pending`. ``then`` is called when all are there.
    """

    def __init__(self, readings: Mapping[str, Reading], then: Callable[[], None]) -> None:
        super().__init__()
        self._readings = readings
        self._then: Callable[[], None] | None = then

    def is_so(self) -> bool:
        return all(reading.is_so() for reading in self._readings.values())

    @property
    def awaited(self) -> str:
        """The name of the first message that is not there."""
        return next((name for name, reading in self._readings.items() if not reading.is_found), "")

    @property
    def finished_at(self) -> Mapping[str, float]:
        """When the messages were published, by name."""
        return {name: reading.buffer.published_at for name, reading in self._readings.items() if reading.is_found}

    def wait(self, timeout: timedelta) -> bool:
        """Return whether, within ``timeout``, the messages are taken in, or it is known that they never will be."""
        if not super().wait(timeout):
            return False
        if self.error is None and self._then is not None:
            then, self._then = self._then, None  # which refers to the holder of this object
            then()
        return True


class _Arrival(NamedTuple):
    """A reading as an operation of ``gossip.communication.host.worker_threads``."""

    reading: Reading
    timeout: timedelta

    def wait(self) -> None:
        """Wait until it is there, for longer than the code that needs it does; raise if it never will be."""
        if not self.reading.wait(self.timeout):
            raise dist.DistNetworkError("the message did not arrive")
        if self.reading.error is not None:
            raise self.reading.error


class LocalMessages:
    """The ranks on this machine, and the messages between them.

    A buffer states which message of its owner it holds for each reader, counted by edge and bucket; a reader polls
    until the one that it needs is there. This involves no socket, and wakes no thread.

    Attributes
    ----------
    local : frozenset of int
        The ranks whose memory this one can read, and that can read this one's. Ranks in another network namespace count
        as being on another machine, because whoever separates them wants their messages on the network.

    Notes
    -----
    Construction is collective: every rank must construct it.
    """

    def __init__(self, world: World, *, shares_memory: bool) -> None:
        self.world = world
        self.local: frozenset[int] = frozenset()
        self._lock = threading.Lock()  # messages are looked for in the training thread and concurrently
        self._seen: list[set[int]] = [set() for _ in range(world.world_size)]
        self._numbers_to: collections.Counter[tuple[int, int]] = collections.Counter()
        self._numbers_from: collections.Counter[tuple[int, int]] = collections.Counter()
        self._buffers: dict[tuple[int, int], list[Buffer]] = collections.defaultdict(list)
        self._arena: Arena | None = None
        own, address = None, Address(os.getpid(), -1, "")
        if shares_memory and hasattr(os, "memfd_create"):
            own = machine()
            self._arena, address = Arena.make(world.world_size)
        everyone = world.gather_json([own, address], "finding neighbours")
        self._arenas = {
            rank: arena
            for rank, (machine, address) in enumerate(everyone)
            if machine is not None and machine == own and rank != world.rank
            if (arena := Arena.at(Address(*address), world.world_size)) is not None
        }
        machines = [str(machine) for machine, _ in everyone if machine is not None]
        if len(set(machines)) < len(machines):
            seen = world.gather_json(list(self._arenas), "finding neighbours")  # after this, all ranks know it
            self._seen = [set(ranks) for ranks in seen]
        self.local = frozenset(rank for rank in self._arenas if self.are_local((world.rank, rank)))

    def are_local(self, ranks: Sequence[int]) -> bool:
        """Return whether all of them can read each other's memory; the result is the same on all ranks."""
        return all(other in self._seen[rank] for rank in ranks for other in ranks if other != rank)

    def new_buffers(self, bucket: int, nbytes: int) -> Sequence[Buffer]:
        """Return memory for messages of this rank, which the others find."""
        assert self._arena is not None
        return self._arena.add(bucket, nbytes)

    def next_number_to(self, reader: int, bucket: int) -> int:
        """Count a message of this rank, and return its number."""
        self._numbers_to[reader, bucket] += 1
        return self._numbers_to[reader, bucket]

    def arrival(self, reading: Reading) -> _Arrival:
        """Return an operation by which a communication thread can wait for the reading."""
        return _Arrival(reading, with_resending(self.world.timeout))

    def expect(self, source: int, bucket: int) -> Reading:
        """Count a message to this rank, and return its reading."""
        self._numbers_from[source, bucket] += 1
        return Reading(self, source, bucket, self._numbers_from[source, bucket])

    def find(self, source: int, bucket: int, number: int) -> Buffer | None:
        """Return the buffer that holds a message, or None if it is not there."""
        with self._lock:
            found = self._among(self._buffers[source, bucket], number)
            if found is None:
                for place, added in self._arenas[source].new_buffers():
                    self._buffers[source, place] += added
                found = self._among(self._buffers[source, bucket], number)
            return found

    def _among(self, buffers: Sequence[Buffer], number: int) -> Buffer | None:
        return next((buffer for buffer in buffers if buffer.holds(number, self.world.rank)), None)

"""Messages between processes of one machine, in memory that the readers read where it is."""

from __future__ import annotations

import collections
import functools
import json
import mmap
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossip.communication.world import World

_MAX_BUFFERS = 3
_ALIGNMENT_BYTES = 64
_PAUSE_S = 0.00005
TOKEN_NUMEL = 4
"""Length of what is sent in place of a message, int64: process, descriptor, secret, number of the exchange."""


class Buffer:
    """Memory for one message, and who has read up to where.

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
    secret : Tensor, [1], int64
    read : Tensor, [world_size], int64
        The number of the newest exchange that each rank has done with.
    """

    def __init__(self, fd: int, world_size: int, nbytes: int) -> None:
        header = 8 * (1 + world_size)
        start = -(-header // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = start + nbytes
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        numbers = flat[:header].view(torch.int64)
        self.secret, self.read = numbers[:1], numbers[1:]
        self.message = flat[start:size]


class OwnBuffer:
    """A buffer that this rank fills.

    Attributes
    ----------
    message : Tensor
        Like the messages.
    readers : tuple of int
        Who was told of what is in it.
    number : int
        Of the exchange that it is part of.
    """

    def __init__(self, world_size: int, nbytes: int, dtype: torch.dtype) -> None:
        self._pid, self._fd = os.getpid(), os.memfd_create("gossip")
        self._buffer = Buffer(self._fd, world_size, nbytes)
        self._buffer.secret.fill_(secrets.randbits(62))
        self.message = self._buffer.message.view(dtype)
        self.readers: tuple[int, ...] = ()
        self.number = 0

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a forked child the number may stand for something else by now
            os.close(self._fd)

    def hand_out(self, readers: tuple[int, ...], number: int) -> torch.Tensor:
        """The token of what is in it, for these ranks."""
        self.readers, self.number = readers, number
        return torch.tensor([self._pid, self._fd, int(self._buffer.secret), number])

    def is_read_by(self, reader: int) -> bool:
        """Whether that rank has done with what is in it."""
        return int(self._buffer.read[reader]) >= self.number

    @property
    def is_free(self) -> bool:
        """Whether everybody has done with what is in it."""
        return all(map(self.is_read_by, self.readers))


class SharedMessage:
    """Where the messages of one bucket of this rank lie.

    A rank that is ahead need not wait for a peer that still reads: another buffer is made then, up to three. With that
    many, one-peer gossip with delays that are exponentially distributed is within 1 % of what it makes without a limit,
    as a recursion over the times of the steps shows; with two it loses 3 to 5 %, from 4 to 64 ranks.
    """

    def __init__(self, world: World, message: torch.Tensor, bucket: int) -> None:
        self._world = world
        self._bucket = bucket
        self._nbytes, self._dtype = message.nbytes, message.dtype
        self._buffers: collections.deque[OwnBuffer] = collections.deque()
        self._count = 0

    @property
    def message(self) -> torch.Tensor:
        """The buffer taken last."""
        return self._buffers[-1].message

    @property
    def num_buffers(self) -> int:
        """How many there are by now."""
        return len(self._buffers)

    def take(self, step: int) -> torch.Tensor:
        """A buffer for the message of ``step``, which nobody reads any more.

        Raises
        ------
        ExchangeError
            There is none, in time.
        """
        if len(self._buffers) < _MAX_BUFFERS and not (self._buffers and self._buffers[0].is_free):
            self._buffers.append(OwnBuffer(self._world.world_size, self._nbytes, self._dtype))
            return self.message
        oldest = self._buffers[0]
        for reader in oldest.readers:
            where = f"step {step}, bucket {self._bucket}"
            failure = self._world.wait_for(_Reading(oldest, reader), where, functools.partial(list, (reader,)))
            if failure is not None:
                raise self._world.lost(
                    failure,
                    f"{where}: waited {failure.waited_s:.3g} s in vain for rank {reader} to read the message of "
                    f"{_MAX_BUFFERS} exchanges ago",
                    advice=" (GossipDataParallel's timeout sets how long to wait)",
                )
        self._buffers.rotate(-1)
        return self.message

    def hand_out(self, readers: tuple[int, ...]) -> torch.Tensor:
        """The token of what was put into the buffer taken last, for these ranks."""
        self._count += 1
        return self._buffers[-1].hand_out(readers, self._count)


class _Reading(NamedTuple):
    """A peer's reading of what is in a buffer."""

    buffer: OwnBuffer
    reader: int

    @property
    def error(self) -> Exception | None:
        """Reading fails on the other side."""
        return None

    def wait(self, timeout: timedelta) -> bool:
        """Whether it has read it within ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.buffer.is_read_by(self.reader):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


class LocalMessages:
    """Which ranks are on this machine, and what they have handed out.

    Attributes
    ----------
    local : frozenset of int
        Ranks whose memory this one can read, and that can read this one's. Ranks in another network namespace count as
        on another machine: whoever keeps them apart wants their messages on the network.

    Notes
    -----
    Collective: every rank must construct it.
    """

    def __init__(self, world: World, *, shares_memory: bool) -> None:
        self._world = world
        self._opened: dict[tuple[int, int, int], Buffer] = {}
        self.local: frozenset[int] = frozenset()
        fd = os.memfd_create("gossip") if shares_memory and hasattr(os, "memfd_create") else None
        try:
            secret = secrets.token_hex(8)
            if fd is not None:
                os.write(fd, secret.encode())
            own = [machine() if fd is not None else None, os.getpid(), fd, secret]
            everyone = _gather(world, own)
            seen = [
                rank
                for rank, (machine, pid, descriptor, text) in enumerate(everyone)
                if machine is not None and machine == own[0] and rank != world.rank and _can_read(pid, descriptor, text)
            ]
            machines = [str(machine) for machine, *_ in everyone if machine is not None]
            if len(set(machines)) < len(machines):
                self._seen = [set(ranks) for ranks in _gather(world, seen)]
            else:
                self._seen = [set() for _ in everyone]  # so all ranks know by now
        finally:
            if fd is not None:
                os.close(fd)
        self.local = frozenset(rank for rank in seen if self.are_local((world.rank, rank)))

    def are_local(self, ranks: Sequence[int]) -> bool:
        """Whether all of them can read each other's memory; the answer is the same on all ranks."""
        return all(other in self._seen[rank] for rank in ranks for other in ranks if other != rank)

    def read(self, token: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """What a peer has handed out, in place: like ``message``, not to be changed."""
        pid, fd, secret, _ = token.tolist()
        buffer = self._opened.get((pid, fd, secret))
        if buffer is None:
            descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            try:
                buffer = Buffer(descriptor, self._world.world_size, message.nbytes)
            finally:
                os.close(descriptor)
            if int(buffer.secret) != secret:
                raise OSError(f"descriptor {fd} of process {pid} is something else by now")
            self._opened[pid, fd, secret] = buffer
        found: torch.Tensor = buffer.message.view(message.dtype)
        return found

    def done(self, tokens: Iterable[torch.Tensor]) -> None:
        """Tell the owners that this rank has read what they handed out."""
        for token in tokens:
            pid, fd, secret, number = token.tolist()
            self._opened[pid, fd, secret].read[self._world.rank] = number


def _gather(world: World, content: Any) -> list[Any]:
    """Every rank's, by rank. Collective."""
    return [json.loads(data) for data in world.gather_bytes(json.dumps(content).encode(), "finding neighbours")]


def machine() -> list[str | int]:
    """Equal in two processes that can have memory in common, and between which nobody has put a network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.getuid(), *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))]


def _can_read(pid: int, fd: int, secret: str) -> bool:
    try:
        return Path(f"/proc/{pid}/fd/{fd}").read_text() == secret
    except OSError:
        return False

"""Messages between processes of one machine, in memory that the readers read where it is."""

from __future__ import annotations

import functools
import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossip.communication.world import World

_NUM_BUFFERS = 2
_ALIGNMENT_BYTES = 64
_PAUSE_S = 0.00005
TOKEN_NUMEL = 5
"""Length of what is sent in place of a message, int64: process, descriptor, secret, buffer, number of the exchange."""


class Memory:
    """What a shared_message is: who has read up to where, and two buffers that its owner fills in turn.

    Parameters
    ----------
    fd : int
        Of an anonymous file, which ends with the last process that has it open or mapped.
    world_size : int
    nbytes : int
        Of a buffer.
    """

    def __init__(self, fd: int, world_size: int, nbytes: int) -> None:
        header = 8 * (1 + _NUM_BUFFERS * world_size)
        start = -(-header // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        padded = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = start + _NUM_BUFFERS * padded
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        numbers = flat[:header].view(torch.int64)
        self.secret = numbers[:1]
        self.read = numbers[1:].view(_NUM_BUFFERS, world_size)
        """The number of the newest exchange that each rank has done with, by buffer."""
        self.buffers = [flat[begin : begin + nbytes] for begin in range(start, size, padded)]


class SharedMessage:
    """Where the messages of one bucket of this rank lie.

    Two buffers: a rank that is ahead by one step need not wait for a peer that still reads.
    """

    def __init__(self, world: World, message: torch.Tensor, bucket: int) -> None:
        self._world = world
        self._bucket = bucket
        self._pid, self._fd = os.getpid(), os.memfd_create("gossip")
        self._memory = Memory(self._fd, world.world_size, message.nbytes)
        self._memory.secret.fill_(secrets.randbits(62))
        self._messages = [buffer.view(message.dtype) for buffer in self._memory.buffers]
        self._readers: list[tuple[int, ...]] = [()] * _NUM_BUFFERS
        self._numbers = [0] * _NUM_BUFFERS
        self._turn = 0
        self._count = 0

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a forked child the number may stand for something else by now
            os.close(self._fd)

    @property
    def message(self) -> torch.Tensor:
        """The buffer taken last."""
        return self._messages[self._turn]

    def take(self, step: int) -> torch.Tensor:
        """The buffer for the message of ``step``, once everybody has done with what was in it.

        Raises
        ------
        ExchangeError
            Somebody has not, in time.
        """
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        number = self._numbers[self._turn]
        for reader in self._readers[self._turn]:
            reading = _Reading(self._memory, self._turn, reader, number)
            where = f"step {step}, bucket {self._bucket}"
            failure = self._world.wait_for(reading, where, functools.partial(list, (reader,)))
            if failure is not None:
                raise self._world.lost(
                    failure,
                    f"{where}: waited {failure.waited_s:.3g} s in vain for rank {reader} to read the message of two "
                    "exchanges ago",
                    advice=" (GossipDataParallel's timeout sets how long to wait)",
                )
        return self.message

    def hand_out(self, readers: tuple[int, ...]) -> torch.Tensor:
        """The token of what was put into the buffer taken last, for these ranks."""
        self._count += 1
        self._readers[self._turn], self._numbers[self._turn] = readers, self._count
        return torch.tensor([os.getpid(), self._fd, int(self._memory.secret), self._turn, self._count])


class _Reading(NamedTuple):
    """A peer's reading of what is in a buffer."""

    memory: Memory
    turn: int
    reader: int
    number: int

    @property
    def error(self) -> Exception | None:
        """Reading fails on the other side."""
        return None

    def wait(self, timeout: timedelta) -> bool:
        """Whether it has read it within ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds()
        while int(self.memory.read[self.turn, self.reader]) < self.number:
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
        self._opened: dict[tuple[int, int, int], Memory] = {}
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
        pid, fd, secret, turn, _ = token.tolist()
        memory = self._opened.get((pid, fd, secret))
        if memory is None:
            descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            try:
                memory = Memory(descriptor, self._world.world_size, message.nbytes)
            finally:
                os.close(descriptor)
            if int(memory.secret) != secret:
                raise OSError(f"descriptor {fd} of process {pid} is something else by now")
            self._opened[pid, fd, secret] = memory
        found: torch.Tensor = memory.buffers[turn].view(message.dtype)
        return found

    def done(self, tokens: Mapping[int, torch.Tensor]) -> None:
        """Tell the owners that this rank has read what they handed out."""
        for token in tokens.values():
            pid, fd, secret, turn, number = token.tolist()
            self._opened[pid, fd, secret].read[turn, self._world.rank] = number


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

"""Messages between processes of one machine, in memory that the readers read where it is."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gossip.communication.world import World
from gossip.errors import ExchangeError

_NUM_BUFFERS = 3
_ALIGNMENT_BYTES = 64
_PAUSE_S = 0.00005
TOKEN_NUMEL = 6
"""Length of what is sent in place of a message, int64: process, descriptor, secret, buffer, number of the exchange,
whether the message is finite."""


class Memory:
    """What a mailbox is: who has read up to where, and buffers that its owner fills.

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
        mapped = mmap.mmap(fd, size)
        numbers = torch.frombuffer(mapped, dtype=torch.int64, count=header // 8)
        self.secret = numbers[:1]
        self.read = numbers[1:].view(_NUM_BUFFERS, world_size)
        """The number of the newest exchange that each rank has done with, by buffer."""
        self.buffers = [
            torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=begin)
            for begin in range(start, size, padded)
        ]


class Mailbox:
    """Where the messages of one bucket of this rank lie.

    A message is made in the first buffer that nobody reads any more. Ranks in step need two; the memory of the third
    one is used, and only then taken from the system, when a peer is late: as a network would, it lets this rank go on.
    """

    def __init__(self, world: World, message: torch.Tensor, bucket: int) -> None:
        self._world = world
        self._bucket = bucket
        self._fd = os.memfd_create("gossip")
        self._memory = Memory(self._fd, world.world_size, message.nbytes)
        self._memory.secret.fill_(secrets.randbits(62))
        self._messages = [buffer.view(message.dtype) for buffer in self._memory.buffers]
        self._readers: list[tuple[int, ...]] = [()] * _NUM_BUFFERS
        self._numbers = [0] * _NUM_BUFFERS
        self._turn = 0
        self._count = 0

    def __del__(self) -> None:
        os.close(self._fd)

    def take(self, step: int) -> torch.Tensor:
        """The buffer for the message of ``step``, once everybody has done with what was in it.

        Raises
        ------
        ExchangeError
            Somebody has not, in time.
        """
        deadline = time.monotonic() + self._world.timeout.total_seconds()
        while (turn := next((each for each in range(_NUM_BUFFERS) if not self._late(each)), None)) is None:
            if time.monotonic() > deadline:
                oldest = min(range(_NUM_BUFFERS), key=self._numbers.__getitem__)
                timeout_s = self._world.timeout.total_seconds()
                raise ExchangeError(
                    f"rank {self._world.rank}: step {step}, bucket {self._bucket}: waited {timeout_s:g} s in vain for "
                    f"rank {self._late(oldest)[0]} to read the message of {_NUM_BUFFERS} exchanges ago; that rank is "
                    "stuck, gone, or has made fewer steps (GossipDataParallel's timeout sets how long to wait)"
                )
            time.sleep(_PAUSE_S)
        self._turn = turn
        return self._messages[turn]

    def _late(self, turn: int) -> list[int]:
        """Who has not done with the buffer."""
        number = self._numbers[turn]
        return [reader for reader in self._readers[turn] if int(self._memory.read[turn, reader]) < number]

    def hand_out(self, readers: tuple[int, ...], *, is_finite: bool) -> torch.Tensor:
        """The token of what was put into the buffer taken last, for these ranks."""
        self._count += 1
        self._readers[self._turn], self._numbers[self._turn] = readers, self._count
        secret = int(self._memory.secret)
        return torch.tensor([os.getpid(), self._fd, secret, self._turn, self._count, int(is_finite)])


class Mailroom:
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
            mine = [_machine() if fd is not None else None, os.getpid(), fd, secret]
            everyone = _gather(world, mine)
            seen = [
                rank
                for rank, (machine, pid, theirs, text) in enumerate(everyone)
                if machine is not None and machine == mine[0] and rank != world.rank and _can_read(pid, theirs, text)
            ]
            self._seen = [set(each) for each in _gather(world, seen)]
        finally:
            if fd is not None:
                os.close(fd)
        self.local = frozenset(rank for rank in seen if self.are_local((world.rank, rank)))

    def are_local(self, ranks: Sequence[int]) -> bool:
        """Whether all of them can read each other's memory; the answer is the same on all ranks."""
        return all(other in self._seen[rank] for rank in ranks for other in ranks if other != rank)

    def read(self, token: torch.Tensor, message: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What a peer has handed out, in place: like ``message``, not to be changed; and whether it is finite."""
        pid, fd, secret, turn, _, is_finite = token.tolist()
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
        found = memory.buffers[turn].view(message.dtype)
        return found, bool(is_finite)

    def done(self, tokens: Mapping[int, torch.Tensor]) -> None:
        """Tell the owners that this rank has read what they handed out."""
        for token in tokens.values():
            pid, fd, secret, turn, number, _ = token.tolist()
            self._opened[pid, fd, secret].read[turn, self._world.rank] = number


def _gather(world: World, content: Any) -> list[Any]:
    """Every rank's, by rank. Collective."""
    return [json.loads(data) for data in world.gather_bytes(json.dumps(content).encode(), "finding neighbours")]


def _machine() -> list[str | int]:
    """Equal in two processes that can have memory in common, and between which nobody has put a network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.getuid(), *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))]


def _can_read(pid: int, fd: int, secret: str) -> bool:
    try:
        return Path(f"/proc/{pid}/fd/{fd}").read_text() == secret
    except OSError:
        return False

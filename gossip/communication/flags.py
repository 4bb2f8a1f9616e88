"""A boolean on which the ranks agree while they train."""

from collections.abc import Callable
from typing import Protocol

import torch

from gossip.communication.device_paths import DevicePaths
from gossip.communication.host.daemon_threads import CLOSING_PATIENCE
from gossip.communication.host.worker_threads import WorkerThreads
from gossip.communication.world import Post, World


class Flag(Protocol):
    """Whether any rank has voted yes, step by step; only :meth:`wait` blocks."""

    def vote(self, yes: bool) -> None:
        """Take part in the next agreement. Local."""

    def wait(self) -> bool | None:
        """Return whether any rank voted yes in the latest agreement of this rank; None if there has been none."""

    def restore(self, answer: bool | None) -> None:
        """Set what :meth:`wait` returns, from a checkpoint. Local."""

    def close(self) -> None:
        """Release its resources. Local."""


class AgreedFlag:
    """A :class:`Flag` for ranks all of which must stay.

    It has its own communicator and threads: its all-reduce ends when the slowest rank has taken part, and must not
    delay the exchanges between other ranks. Construction is collective, and every rank must vote equally often.
    """

    def __init__(self, world: World, what: str) -> None:
        self._world = world
        self._what = what
        self._answer: bool | None = None
        self._pending: tuple[Callable[[], None], torch.Tensor] | None = None  # what waits for the sum, and the sum
        if not world.is_alone:
            assert world.membership is not None
            self._group = world.communicator(range(world.world_size), what)
            self._worker_threads = WorkerThreads(f"gossip-flag-{world.rank}", world.timeout)
            self._device_paths = DevicePaths(self._worker_threads, world.membership.backends)

    def vote(self, yes: bool) -> None:
        if self._world.is_alone:
            self._answer = yes
            return
        flag, group = torch.tensor([float(yes)], device=self._world.control_device), self._group
        posts: list[Post] = [lambda _, received: group.allreduce([received[0]])]
        self._pending = self._world.begin(posts, [flag], [flag], self._what, paths=self._device_paths), flag

    def wait(self) -> bool | None:
        if self._pending is not None:
            wait, flag = self._pending
            wait()
            self._pending, self._answer = None, bool(flag.item())
        return self._answer

    def restore(self, answer: bool | None) -> None:
        self._pending = None
        self._answer = answer

    def close(self) -> None:
        if hasattr(self, "_worker_threads"):
            self._worker_threads.close(CLOSING_PATIENCE)

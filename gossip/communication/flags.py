"""A yes or no that the ranks agree on while they train."""

from __future__ import annotations

import torch

from gossip.communication.courier import Courier, Operation, Talk
from gossip.communication.lanes import Lanes, Pending, Tensors
from gossip.communication.threads import CLOSING_PATIENCE
from gossip.communication.world import DEATH_PATIENCE, World
from gossip.errors import ExchangeError


class AgreedFlag:
    """Whether any rank said yes, step by step; nobody waits but who asks.

    It has a communicator and threads of its own: its all-reduce ends when the slowest rank has spoken, and must not
    hold up the exchanges between others.

    Parameters
    ----------
    world : World
    what : str
        For the error: what is agreed on.

    Notes
    -----
    Collective: every rank must construct it, and say yes or no equally often.
    """

    def __init__(self, world: World, what: str) -> None:
        self._world = world
        self._what = what
        self._answer: bool | None = None
        self._pending: tuple[Pending, torch.Tensor] | None = None
        if world.group is not None:
            assert world.membership is not None
            self._group = world.communicator(range(world.world_size), what)
            self._courier = Courier(f"gossip-flag-{world.rank}", world.timeout)
            self._lanes = Lanes(self._courier, world.membership.backends)

    def say(self, yes: bool) -> None:
        """Take part in the next agreement. Local."""
        if self._world.group is None:
            self._answer = yes
            return
        self._world.roll_call.note(self._what)
        flag = torch.tensor([float(yes)], device=self._world.control_device)
        group = self._group

        def converse(_: Tensors, received: Tensors) -> Talk:
            yield (Operation("all other ranks", group.allreduce([received[0]])),)

        self._pending = (self._lanes.submit(converse, [flag], [flag]), flag)

    def wait(self) -> bool | None:
        """Whether any rank said yes in the agreement that this rank took part in last; None if there was none yet.

        Raises
        ------
        ExchangeError
            Not all ranks took part in time.
        """
        if self._pending is None:
            return self._answer
        pending, flag = self._pending
        where = f"rank {self._world.rank}: {self._what}"
        if not pending.wait(self._world.timeout):
            raise ExchangeError(
                f"{where}: not all of the {self._world.world_size} ranks took part within "
                f"{self._world.timeout.total_seconds():g} s: {self._world.roll_call.explain()}; every rank must make "
                "the same steps"
            )
        if pending.error is not None:
            who = self._world.roll_call.explain(DEATH_PATIENCE)
            raise ExchangeError(f"{where}: {pending.error}: {who}") from pending.error
        self._pending = None
        self._answer = bool(flag.item())
        return self._answer

    def restore(self, answer: bool | None) -> None:
        """Set what :meth:`wait` returns, from a checkpoint. Local."""
        self._pending = None
        self._answer = answer

    def close(self) -> None:
        """End the threads. Local."""
        if hasattr(self, "_courier"):
            self._courier.close(CLOSING_PATIENCE)

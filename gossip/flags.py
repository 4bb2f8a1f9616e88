"""A yes or no that the ranks agree on while they train."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gossip.courier import Courier, Ticket
from gossip.errors import ExchangeError
from gossip.world import CLOSING_PATIENCE, World, named


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
        self._pending: tuple[Ticket, torch.Tensor] | None = None
        if world.world_size > 1:
            self._group = world.new_group(range(world.world_size))
            self._courier = Courier(f"gossip-flag-{world.rank}")

    def say(self, yes: bool) -> None:
        """Take part in the next agreement. Local."""
        flag = torch.tensor([float(yes)])
        if self._world.world_size == 1:
            ticket = Ticket(tuple)
            ticket.serve()
        else:
            ticket = self._courier.submit(
                lambda: named("all other ranks", dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True))
            )
        self._pending = (ticket, flag)

    def wait(self) -> bool | None:
        """Whether any rank said yes in the agreement that this rank took part in last; None if there was none yet.

        Raises
        ------
        ExchangeError
            Not all ranks took part in time.
        """
        if self._pending is None:
            return None
        ticket, flag = self._pending
        where = f"rank {self._world.rank}: {self._what}"
        if not ticket.wait(self._world.timeout):
            raise ExchangeError(
                f"{where}: not all of the {self._world.world_size} ranks took part within "
                f"{self._world.timeout.total_seconds():g} s; every rank must make the same steps"
            )
        if ticket.error is not None:
            raise ExchangeError(f"{where}: {ticket.error}") from ticket.error
        return bool(flag.item())

    def restore(self, value: bool | None) -> None:
        """Set what :meth:`wait` returns, from a checkpoint. Local."""
        if value is None:
            self._pending = None
            return
        ticket = Ticket(tuple)
        ticket.serve()
        self._pending = (ticket, torch.tensor([float(value)]))

    def close(self) -> None:
        """End the threads. Local."""
        if self._world.world_size > 1:
            self._courier.close(CLOSING_PATIENCE)

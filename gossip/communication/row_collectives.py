"""Collectives of a world in which every rank has a row, begun at one time and awaited at another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gossip.communication.shared_memory import LocalMessages, SharedMessage
from gossip.communication.world import World

_CHUNK_BYTES = 2 * 2**20
_ROWS = 0  # the only bucket of the messages


class RowGatherer:
    """Gathers rows of all ranks: through memory where all are on this machine, and otherwise by an all-gather.

    Parameters
    ----------
    world : World
        The ranks.
    shares_memory : bool
        Whether rows that are in the memory of the host may go through memory that the ranks share, a chunk at a time.

    Notes
    -----
    Construction is collective, and so is every method.
    """

    def __init__(self, world: World, *, shares_memory: bool) -> None:
        self._world = world
        self._own: SharedMessage | None = None
        if world.is_alone:
            return
        self._messages = LocalMessages(world, shares_memory=shares_memory)
        if self._messages.are_local(range(world.world_size)):
            self._chunk_bytes = _CHUNK_BYTES
            self._own = SharedMessage(self._messages, torch.empty(self._chunk_bytes, dtype=torch.uint8), _ROWS)

    @property
    def is_in_memory(self) -> bool:
        """Whether rows in the memory of the host go through memory that the ranks share."""
        return self._own is not None

    def begin(self, rows: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to fill in the rows of the other ranks, in place. Collective.

        Parameters
        ----------
        rows : Tensor, [world_size, ...], contiguous
            This rank's row holds its values; shape and dtype are the same on all ranks.
        what : str
            What it is done for, for error texts.

        Returns
        -------
        callable
            Waits until all rows are there; on a device only what follows there waits. Raises ExchangeError if a rank
            did not take part in time.
        """
        if self._world.is_alone:
            return lambda: None
        if self._own is None or not rows.is_cpu:
            return self._begin_all_gather(rows, what)
        return partial(self._gather_in_memory, self._own, rows.view(len(rows), -1).view(torch.uint8), what)

    def _gather_in_memory(self, own: SharedMessage, rows: torch.Tensor, what: str) -> None:
        others = self._world.others
        for chunk in rows.split(self._chunk_bytes, dim=1):
            own.take(what)[: chunk.shape[1]].copy_(chunk[self._world.rank])
            own.publish(others)
            for rank in others:
                reading = self._messages.expect(rank, _ROWS)
                failure = self._world.wait_for(reading, what, partial(list, (rank,)))
                if failure is not None:
                    raise self._world.lost(failure, what)
                chunk[rank].copy_(reading.message[: chunk.shape[1]])
                reading.done()

    def _begin_all_gather(self, rows: torch.Tensor, what: str) -> Callable[[], None]:
        data = self._world.on_wire(rows)
        own = data[self._world.rank].reshape(-1).clone()
        group = self._world.open_group()
        wait = self._world.begin(
            [lambda sent, received: group._allgather_base(received[0], sent[0])],
            [own],
            [data.view(-1)],
            what,
            holds_host=False,
        )

        def finish() -> None:
            wait()
            if data is not rows:
                rows.copy_(data)

        return finish


def begin_sum_of_rows(world: World, rows: torch.Tensor, what: str) -> Callable[[], torch.Tensor]:
    """Begin to sum, over the ranks, what they have for each of them: a reduce-scatter. Collective.

    Parameters
    ----------
    world : World
        The ranks.
    rows : Tensor, [world_size, numel], contiguous
        A row for each rank; shape and dtype are the same on all ranks.
    what : str
        What it is done for, for error texts.

    Returns
    -------
    callable
        Waits as that of :meth:`RowGatherer.begin` does, and returns the sum of this rank's rows, [numel].
    """
    if world.is_alone:
        return lambda: rows[0]
    data = world.on_wire(rows)
    summed = torch.empty_like(data[0])
    group = world.open_group()
    wait = world.begin(
        [lambda sent, received: group._reduce_scatter_base(received[0], sent[0])],
        [data.view(-1)],
        [summed],
        what,
        holds_host=False,
    )

    def finish() -> torch.Tensor:
        wait()
        return summed.to(rows.device)

    return finish

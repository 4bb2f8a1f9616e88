"""Collectives of a world in which every rank has a row, begun at one time and awaited at another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gossip.communication.world import World


def begin_gathering_rows(world: World, rows: torch.Tensor, what: str) -> Callable[[], None]:
    """Begin to fill in the rows of the other ranks, in place: an all-gather. Collective.

    Parameters
    ----------
    world : World
        The ranks.
    rows : Tensor, [world_size, ...], contiguous
        This rank's row holds its values; shape and dtype are the same on all ranks.
    what : str
        What it is done for, for error texts.

    Returns
    -------
    callable
        Waits until all rows are there; on a device only what follows there waits. Raises ExchangeError if a rank did
        not take part in time.
    """
    if world.is_alone:
        return lambda: None
    data = world.on_wire(rows)
    own = data[world.rank].reshape(-1).clone()
    group = world.open_group()
    wait = world.begin(
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
        Waits as that of :func:`begin_gathering_rows` does, and returns the sum of this rank's rows, [numel].
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

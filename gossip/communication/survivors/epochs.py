"""Which ranks train, and from which step on."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.communication.survivors.flag_board import Position


@dataclass(frozen=True)
class Epoch:
    """Steps that the same ranks make.

    Attributes
    ----------
    number : int
        The number of the epoch: 0 at the beginning, later ones increasing, not always by 1.
    members : tuple of int
        The ranks that train, numbered as at the beginning; their positions here are their ranks in the topology.
    first_step : int
        The step from which on steps belong to it, unless a later epoch has them.
    position : tuple of int
        The position of the member that was furthest ahead at the time.
    has_first_steps : bool
        Whether members join or leave with its first step, so that no rank may enter it before.
    left : tuple of int
        The ranks that left with its first step, and had announced it.
    """

    number: int
    members: tuple[int, ...]
    first_step: int = 0
    position: Position = (0, 0, 0)
    has_first_steps: bool = False
    left: tuple[int, ...] = ()

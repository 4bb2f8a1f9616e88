"""Who trains, and from which step on."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.communication.survivors.flag_board import Position


@dataclass(frozen=True)
class Epoch:
    """Steps that the same ranks make.

    Attributes
    ----------
    number : int
        0 at the beginning; later ones grow, not always by 1.
    members : tuple of int
        Who trains, by their ranks at the beginning; their places here are their ranks in the topology.
    first_step : int
        Steps from this one on belong to it, unless a later epoch has them.
    position : tuple of int
        That of the member who was the farthest then.
    has_first_steps : bool
        Whether members join or leave with its first step: nobody may enter it before.
    left : tuple of int
        Who left with its first step, and had said so.
    """

    number: int
    members: tuple[int, ...]
    first_step: int = 0
    position: Position = (0, 0, 0)
    has_first_steps: bool = False
    left: tuple[int, ...] = ()

"""Which ranks train, and from which step on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gossip.communication.survivors.flag_board import Position
from gossip.communication.survivors.mesh import in_words
from gossip.errors import ExchangeError


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
    positions : tuple of (int, tuple of int)
        The members that agreed on it, and their positions at the time.
    has_first_steps : bool
        Whether members join or leave with its first step, so that no rank may enter it before.
    left : tuple of int
        The ranks that left with its first step, and had announced it.
    """

    number: int
    members: tuple[int, ...]
    first_step: int = 0
    positions: tuple[tuple[int, Position], ...] = ()
    has_first_steps: bool = False
    left: tuple[int, ...] = ()

    def furthest(self, members: Collection[int]) -> Position:
        """Return the position of the one of ``members`` that was furthest ahead at the time."""
        return max(position for member, position in self.positions if member in members)


def too_few(
    member: int, left: Sequence[int], initial: Sequence[int], reasons: Mapping[int, str], min_ranks: int
) -> ExchangeError:
    """Return the error of a rank when fewer than ``min_ranks`` are left of the initial ranks."""
    gone = [other for other in initial if other not in left]
    missing = "; ".join(f"rank {other}: {reasons.get(other, 'dropped by others')}" for other in gone)
    return ExchangeError(
        f"rank {member}: {len(left)} of {len(initial)} ranks remain ({in_words(left)}), fewer than "
        f"min_ranks={min_ranks}; missing: {missing}. Start again from the newest checkpoint, or pass a lower min_ranks",
        culprits=gone,
    )

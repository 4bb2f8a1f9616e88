"""Which ranks train, and from which step on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossip.elastic.flag_votes import Position


@dataclass(frozen=True)
class Generation:
    """Steps that the same ranks make.

    Attributes
    ----------
    number : int
        The number of the generation: 0 at the beginning, later ones increasing, not always by 1.
    members : tuple of int
        The ranks that train, numbered as at the beginning; their positions here are their ranks in the topology.
    first_step : int
        The step from which on steps belong to it, unless a later generation has them.
    positions : tuple of (int, tuple of int)
        The members that agreed on it, and their positions at the time.
    has_first_steps : bool
        Whether members join or leave with its first step, so that no rank may enter it before.
    left : tuple of int
        The ranks that left with its first step, or an earlier one, and had announced it.
    joined_at : tuple of (int, int)
        How many checkpoints had been loaded, and the first step of the ranks that joined last.
    """

    number: int
    members: tuple[int, ...]
    first_step: int = 0
    positions: tuple[tuple[int, Position], ...] = ()
    has_first_steps: bool = False
    left: tuple[int, ...] = ()
    joined_at: tuple[int, int] = (0, -1)

    def followed_by(
        self,
        number: int,
        members: Sequence[int],
        leaving: Sequence[int],
        parting: Sequence[int],
        positions: Iterable[tuple[int, Sequence[int]]],
        *,
        begun: Sequence[int] | None,
        is_in_step: bool,
    ) -> Generation:
        """Return the generation of these members, which begins after the newest of the positions in the votes.

        If some have ``begun`` a collective operation there, before that step, ranks that are leaving do not make it:
        they take no part, and the others exchange without them from then on. Those that left before may still make it,
        and so do all if a rank has joined that takes no part yet.
        """
        noted = tuple((other, (loads, step, ends)) for other, (loads, step, ends) in positions)
        newest = max(position for _, position in noted)
        is_before = bool(leaving) and begun is not None and tuple(begun) == newest and self.joined_at < newest[:2]
        least = self.first_step * self.has_first_steps  # whoever leaves with it makes those before with the others
        first_step = max(newest[1] + (not is_before), least) if is_in_step else 0
        joins, left = not set(members).issubset(self.members), (*leaving, *parting)
        is_exact = joins or bool(leaving) or (self.has_first_steps and self.first_step >= first_step)
        joined_at = (newest[0], first_step) if joins else self.joined_at
        return Generation(number, tuple(members), first_step, noted, is_in_step and is_exact, left, joined_at)

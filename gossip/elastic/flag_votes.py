"""What the members have said yes to, step by step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Frame, Key, Kind

_MOST_WORDS = 1024  # of a member; ranks that exchange are never that many steps apart
_STEPS = 2**40

Position = tuple[int, int, int]
"""The progress of a rank: the number of checkpoints loaded, its step, and of collective operations since that step."""

Yes = tuple[int, int, Position]
"""Member, question and position."""


class FlagVotes:
    """The words of all members: each tells all others, and only a rank that needs to know waits.

    Parameters
    ----------
    mesh : Mesh
        The connections; its :attr:`~gossip.elastic.connections.mesh.Mesh.changed` guards what is noted here.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._words: dict[int, OrderedDict[tuple[int, Position], bool]] = {}
        mesh.handlers[Kind.WORD] = self._note

    def tell(self, members: Iterable[int], question: int, position: Position, yes: bool) -> None:
        """Say yes or no to other members. Does not block."""
        num_loaded, step, num_ended = position
        for member in members:
            self._mesh.send(member, Key(Kind.WORD, question, num_loaded * _STEPS + step, 2 * num_ended + yes))

    def word_of(self, member: int, question: int, position: Position) -> bool | None:
        """Return what a member has said, or None; the mesh's ``changed`` must be held."""
        words = self._words.get(member)
        return None if words is None else words.get((question, position))

    def yeses_of(self, members: Iterable[int]) -> list[Yes]:
        """Return what is known here of lost members; nothing is added to it any more."""
        with self._mesh.changed:
            known = ((member, self._words.get(member, OrderedDict())) for member in members)
            return [(member, *word) for member, words in known for word, yes in words.items() if yes]

    def take_over(self, yeses: Sequence[Yes]) -> None:
        """Adopt what others know of lost members."""
        with self._mesh.changed:
            for member, question, (num_loaded, step, num_ended) in yeses:
                self._put(member, question, (num_loaded, step, num_ended), True)

    def _note(self, member: int, frame: Frame) -> None:
        """Note a word, in the mesh's thread."""
        _, question, second, third = frame.key
        num_loaded, step = divmod(second, _STEPS)
        num_ended, yes = divmod(third, 2)
        with self._mesh.changed:
            if member not in self._mesh.lost:
                self._put(member, question, (num_loaded, step, num_ended), bool(yes))
                self._mesh.changed.notify_all()

    def _put(self, member: int, question: int, position: Position, yes: bool) -> None:
        words = self._words.setdefault(member, OrderedDict())
        words[question, position] = yes
        while len(words) > _MOST_WORDS:
            words.popitem(last=False)

"""How the members have voted on flags, step by step."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Frame, Key, Kind

_MOST_VOTES = 1024  # of a member; ranks that exchange are never that many steps apart
_STEPS = 2**40

Position = tuple[int, int, int]
"""The progress of a rank: the number of checkpoints loaded, its step, and of collective operations since that step."""

FlagVote = tuple[int, int, Position]
"""The member, question and position of a vote for yes."""


class FlagVotes:
    """The votes of all members: each tells all others, and only a rank that needs to know waits.

    :attr:`~gossip.elastic.connections.mesh.Mesh.changed` guards what is noted here.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._votes: dict[int, OrderedDict[tuple[int, Position], bool]] = {}
        mesh.handlers[Kind.FLAG_VOTE] = self._note

    def tell(self, members: Iterable[int], question: int, position: Position, yes: bool) -> None:
        """Vote for other members to know. Does not block."""
        num_loaded, step, num_ended = position
        for member in members:
            self._mesh.send(member, Key(Kind.FLAG_VOTE, question, num_loaded * _STEPS + step, 2 * num_ended + yes))

    def vote_of(self, member: int, question: int, position: Position, *, or_later: bool = False) -> bool | None:
        """Return how a member has voted, or later in that step, or None; the mesh's ``changed`` must be held."""
        votes = self._votes.get(member, OrderedDict())
        later = (at for what, at in votes if or_later and what == question and at[:2] == position[:2] and at > position)
        return votes.get((question, next(later, position)))

    def votes_of(self, members: Iterable[int]) -> list[FlagVote]:
        """Return what is known here of lost members; nothing is added to it any more."""
        with self._mesh.changed:
            known = ((member, self._votes.get(member, OrderedDict())) for member in members)
            return [(member, *vote) for member, votes in known for vote, yes in votes.items() if yes]

    def take_over(self, flag_votes: Sequence[FlagVote]) -> None:
        """Adopt what others know of lost members."""
        with self._mesh.changed:
            for member, question, (num_loaded, step, num_ended) in flag_votes:
                self._put(member, question, (num_loaded, step, num_ended), True)

    def _note(self, member: int, frame: Frame) -> None:
        """Note a vote, in the mesh's thread."""
        _, question, second, third = frame.key
        num_loaded, step = divmod(second, _STEPS)
        num_ended, yes = divmod(third, 2)
        with self._mesh.changed:
            if member not in self._mesh.lost:
                self._put(member, question, (num_loaded, step, num_ended), bool(yes))
                self._mesh.changed.notify_all()

    def _put(self, member: int, question: int, position: Position, yes: bool) -> None:
        votes = self._votes.setdefault(member, OrderedDict())
        votes[question, position] = yes
        while len(votes) > _MOST_VOTES:
            votes.popitem(last=False)

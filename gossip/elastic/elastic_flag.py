"""A boolean on which the remaining ranks agree while they train."""

import zlib

from gossip.elastic.elastic_world import ElasticWorld
from gossip.elastic.flag_votes import Position
from gossip.errors import ExchangeError


class ElasticFlag:
    """A :class:`gossip.communication.flags.Flag` for ranks some of which may be lost.

    What a rank had voted before it was lost counts equally on all others, even if it had told only one of them: they
    agree on it when they agree on the remaining ranks. ``what`` is agreed on is the same on all ranks.
    """

    def __init__(self, world: ElasticWorld, what: str) -> None:
        self._world = world
        self._what = what
        self._question = zlib.crc32(what.encode())
        self._pending: tuple[Position, bool, tuple[int, ...]] | None = None
        self._answer: bool | None = None

    def vote(self, yes: bool) -> None:
        consensus = self._world.consensus
        members = consensus.entered.members
        self._pending = consensus.position, yes, tuple(each for each in members if each not in consensus.apart)
        others = (member for member in members if member != self._world.member)
        consensus.flag_votes.tell(others, self._question, consensus.position, yes)

    def wait(self) -> bool | None:
        """As in the base; if this rank cannot continue, which it learns at the end of its step, it has no meaning."""
        if self._pending is None:
            return self._answer
        position, answer, members = self._pending
        consensus, mesh = self._world.consensus, self._world.mesh
        missing = set(members) - {self._world.member}

        def look() -> bool:
            nonlocal answer
            try:
                latest = consensus.latest
            except ExchangeError:
                return True  # this rank cannot continue: it raises, or comes back, at the end of its step
            # What ranks that leave have voted is known once they have said goodbye, as long as this one does not leave.
            are_agreed_on = {*latest.members, *(set(latest.left) - mesh.farewells.keys())}
            if leaves := (self._world.member not in latest.members or consensus.is_left_behind):
                are_agreed_on.clear()
            for member in list(missing):
                vote = consensus.flag_votes.vote_of(member, self._question, position, or_later=leaves)
                if vote is not None or (member in mesh.lost and member not in are_agreed_on):
                    answer |= bool(vote)
                    missing.discard(member)
            return not missing

        num_loaded, step, _ = position
        where = f"step {step}: {self._what}"
        self._world.wait_until(look, lambda: sorted(missing), where, is_sent_at=(num_loaded, step + 1, 0))
        self._pending, self._answer = None, answer
        return answer

    def restore(self, answer: bool | None) -> None:
        self._pending, self._answer = None, answer

    def close(self) -> None:
        """Do nothing, as there is nothing to release."""

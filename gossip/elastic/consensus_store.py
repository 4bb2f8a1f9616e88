"""Proposals, votes and decisions of the ranks that agree on who trains, in the key-value store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from gossip.communication.authenticated_store import NotGenuine
from gossip.elastic.flag_votes import FlagVote, Position
from gossip.errors import ExchangeError


class Proposal(NamedTuple):
    """Who should train.

    Attributes
    ----------
    members : sequence of int
        The ranks that continue, and one that joins.
    leaving : sequence of int
        Ranks that leave, and vote with their steps like the members.
    returning : sequence of int
        Of the members, one that joins from within its loop, where it ends a step like the others.
    """

    members: Sequence[int]
    leaving: Sequence[int] = ()
    returning: Sequence[int] = ()


class Vote(NamedTuple):
    """What a rank of a proposal says of itself.

    Attributes
    ----------
    position : tuple of int
        The position that it does not leave before there is a decision.
    flag_votes : list of tuple
        The votes for yes that it knows of lost ranks.
    is_joint : bool
        Whether it is in a collective operation.
    """

    position: Position
    flag_votes: list[FlagVote]
    is_joint: bool


class Decision(NamedTuple):
    """What the votes of all ranks of a proposal add up to.

    Attributes
    ----------
    positions : list of (int, tuple of int)
        The ranks that continue, join or leave, and their positions.
    flag_votes : list of tuple
        The votes for yes of the lost ranks.
    """

    positions: list[tuple[int, Position]]
    flag_votes: list[FlagVote]


class StoreLost(ExchangeError):
    """The key-value store does not reply; the text says why, if that is known."""


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Within the block, a store is asked.

    Raises
    ------
    StoreLost
        It does not reply.
    NotGenuine
        It has a value that no rank has written.
    """
    try:
        yield
    except NotGenuine:
        raise
    except RuntimeError as error:  # stores have no specific type of errors
        raise StoreLost(f"the key-value store does not reply ({str(error).partition(chr(10))[0]})") from error


class ConsensusStore:
    """Proposals, votes and decisions by the numbers of the attempts; what is written once reads the same for all ranks.

    Parameters
    ----------
    store : Store
        A store with keys that nothing else uses.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store: Any = store

    def is_proposed(self, number: int) -> bool:
        """Return whether there is a proposal."""
        return self._has(f"proposal/{number}")

    def propose(self, number: int, proposal: Proposal | None) -> Proposal:
        """Return the proposal: this one, unless another rank was first."""
        return Proposal(*self._set_once(f"proposal/{number}", proposal))

    def proposal(self, number: int) -> Proposal:
        """Return the proposal that there is."""
        return Proposal(*self._get(f"proposal/{number}"))

    def vote(self, number: int, member: int, vote: Vote) -> None:
        """Write the vote of a rank."""
        with asking():
            self.store.set(f"vote/{number}/{member}", json.dumps(vote))

    def without_vote(self, number: int, members: Collection[int]) -> list[int]:
        """Return those of ``members`` that have written no vote."""
        return [member for member in members if not self._has(f"vote/{number}/{member}")]

    def votes(self, number: int, members: Collection[int]) -> dict[int, Vote]:
        """Return the votes of ``members``, which are there."""
        return {member: Vote(*self._get(f"vote/{number}/{member}")) for member in members}

    def is_decided(self, number: int) -> bool:
        """Return whether there is a decision."""
        return self._has(f"decision/{number}")

    def decide(self, number: int, decision: Decision | None) -> Decision | None:
        """Return the decision: this one, unless another rank was first; None is that the attempt is void."""
        return _decision(self._set_once(f"decision/{number}", decision))

    def decision(self, number: int) -> Decision | None:
        """Return the decision that there is; None if the attempt is void."""
        return _decision(self._get(f"decision/{number}"))

    def _has(self, key: str) -> bool:
        with asking():
            return bool(self.store.check([key]))

    def _get(self, key: str) -> Any:
        with asking():
            found = self.store.get(key)
        return json.loads(found)

    def _set_once(self, key: str, value: Any) -> Any:
        with asking():
            found = self.store.compare_set(key, "", json.dumps(value))
        return json.loads(found)


def _decision(found: Any) -> Decision | None:
    return None if found is None else Decision(*found)

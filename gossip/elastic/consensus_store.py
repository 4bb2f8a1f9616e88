"""Proposals, votes and decisions of the ranks that agree on who trains, in the key-value store."""

import json
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from gossip.communication.authenticated_store import NotGenuine
from gossip.communication.host import daemon_threads
from gossip.elastic.flag_votes import FlagVote, Position
from gossip.errors import ExchangeError


class Proposal(NamedTuple):
    """Who should train: ``members`` are the ranks that continue, and one that joins.

    Ranks that are ``leaving`` vote with their steps like the members. A member that is ``returning`` joins from within
    its loop, where it ends a step like the others. Ranks that ``ended`` have closed their models, and said goodbye.
    With ``is_last`` all members end together. Ranks that are ``parting`` by an earlier decision make their last steps.
    """

    members: Sequence[int]
    leaving: Sequence[int] = ()
    returning: Sequence[int] = ()
    ended: Sequence[int] = ()
    is_last: bool = False
    parting: Sequence[int] = ()


class Vote(NamedTuple):
    """What a rank of a proposal says of itself.

    It does not leave its ``position`` before there is a decision. ``flag_votes`` are the votes for yes that it knows of
    lost ranks, and ``farewells`` the positions at which these closed their models, as far as it knows. ``is_joint``
    says whether it is in a collective operation.
    """

    position: Position
    flag_votes: list[FlagVote]
    farewells: list[tuple[int, Position]]
    is_joint: bool


class Decision(NamedTuple):
    """What the votes of all ranks of a proposal add up to: their positions, and what they know of lost ranks.

    ``begun`` is the position of the furthest collective operation that one of them is in, if any is. Without positions
    the attempt is void; the next one is made without the ranks that were ``lost`` meanwhile, of which some have
    ``ended``, as in a proposal.
    """

    positions: Sequence[tuple[int, Position]] = ()
    flag_votes: Sequence[FlagVote] = ()
    farewells: Sequence[tuple[int, Position]] = ()
    lost: Sequence[int] = ()
    ended: Sequence[int] = ()
    begun: Position | None = None


class StoreLost(ExchangeError):
    """The key-value store does not reply; the text says why, if that is known."""


class ConsensusStore:
    """Proposals, votes and decisions by the numbers of the attempts; what is written once reads the same for all ranks.

    Its methods raise StoreLost if the store, with keys that nothing else uses, does not reply, and NotGenuine if it has
    a value that no rank has written.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store: Any = store

    def is_proposed(self, number: int) -> bool:
        return self._has(f"proposal/{number}")

    def propose(self, number: int, proposal: Proposal | None) -> Proposal:
        """Return the proposal: this one, unless another rank was first."""
        return Proposal(*self._set_once(f"proposal/{number}", proposal))

    def proposal(self, number: int) -> Proposal:
        return Proposal(*self._get(f"proposal/{number}"))

    def vote(self, number: int, member: int, vote: Vote) -> None:
        _asked(self.store.set, f"vote/{number}/{member}", json.dumps(vote))

    def without_vote(self, number: int, members: Collection[int]) -> list[int]:
        """Return those of ``members`` that have written no vote."""
        return [member for member in members if not self._has(f"vote/{number}/{member}")]

    def votes(self, number: int, members: Collection[int]) -> dict[int, Vote]:
        """Return the votes of ``members``, which are there."""
        return {member: Vote(*self._get(f"vote/{number}/{member}")) for member in members}

    def is_decided(self, number: int) -> bool:
        return self._has(f"decision/{number}")

    def decide(self, number: int, decision: Decision) -> Decision:
        """Return the decision: this one, unless another rank was first."""
        return Decision(*self._set_once(f"decision/{number}", decision))

    def decision(self, number: int) -> Decision:
        return Decision(*self._get(f"decision/{number}"))

    def note_status(self, member: int, status: object) -> None:
        """Write what a rank says of itself for ``gossip status``."""
        _asked(self.store.set, f"status/{member}", json.dumps(status))

    def _has(self, key: str) -> bool:
        return bool(_asked(self.store.check, [key]))

    def _get(self, key: str) -> Any:
        return json.loads(_asked(self.store.get, key))

    def _set_once(self, key: str, value: Any) -> Any:
        return json.loads(_asked(self.store.compare_set, key, "", json.dumps(value)))


def within(timeout: timedelta, call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call of the store returns, or raise StoreLost if that takes longer: torch's client waits for ever.

    For threads that must go on; the call is made in a thread of its own, which is left to itself then.
    """
    has_ended = threading.Event()
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        results.append(call(*args))
        has_ended.set()

    def failed(error: Exception) -> None:
        errors.append(error)
        has_ended.set()

    daemon_threads.start("gossip-store-call", run, end=has_ended.set, failed=failed)
    if not has_ended.wait(timeout.total_seconds()):
        raise StoreLost(f"the key-value store has not replied for {timeout.total_seconds():g} s")
    if errors:
        raise errors[0]
    return results[0]


def _asked(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except NotGenuine:
        raise
    except RuntimeError as error:  # stores have no specific type of errors
        raise StoreLost(f"the key-value store does not reply ({str(error).partition(chr(10))[0]})") from error

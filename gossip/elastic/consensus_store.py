"""Which ranks train, from which step on, and proposals, votes and decisions about it in the key-value store.

And whether that still replies: training does not need it before ranks are lost, leave or join.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from loguru import logger

from gossip.communication.authenticated_store import NotGenuine
from gossip.communication.host import daemon_threads
from gossip.communication.liveness.progress_markers import STORE_PATIENCE_S
from gossip.elastic.flag_votes import FlagVote, Position
from gossip.errors import ExchangeError

_INTERVAL_S = 1.0


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
        The ranks that left with its first step, and had announced it.
    """

    number: int
    members: tuple[int, ...]
    first_step: int = 0
    positions: tuple[tuple[int, Position], ...] = ()
    has_first_steps: bool = False
    left: tuple[int, ...] = ()

    def followed_by(
        self,
        number: int,
        members: Sequence[int],
        leaving: Sequence[int],
        positions: Iterable[tuple[int, Sequence[int]]],
        *,
        begun: Sequence[int] | None,
        is_in_step: bool,
    ) -> Generation:
        """Return the generation of these members, which begins after the newest of the positions in the votes.

        If some have ``begun`` a collective operation there, before that step, ranks that are leaving do not make it:
        they take no part, and the others exchange without them from then on. Those that left before may still make it.
        """
        noted = tuple((other, (loads, step, ends)) for other, (loads, step, ends) in positions)
        newest = max(position for _, position in noted)
        is_before = bool(leaving) and begun is not None and tuple(begun) == newest
        is_before = is_before and not (self.has_first_steps and self.first_step > newest[1])
        first_step = newest[1] + (not is_before) if is_in_step else 0
        changes = bool(set(members) - set(self.members) or leaving)
        is_exact = changes or (self.has_first_steps and self.first_step >= first_step)
        return Generation(
            number, tuple(members), first_step, noted, has_first_steps=is_in_step and is_exact, left=tuple(leaving)
        )


class Proposal(NamedTuple):
    """Who should train: ``members`` are the ranks that continue, and one that joins.

    Ranks that are ``leaving`` vote with their steps like the members. A member that is ``returning`` joins from within
    its loop, where it ends a step like the others. Ranks that ``ended`` have closed their models, and said goodbye.
    With ``is_last`` all members end together.
    """

    members: Sequence[int]
    leaving: Sequence[int] = ()
    returning: Sequence[int] = ()
    ended: Sequence[int] = ()
    is_last: bool = False


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


class StoreMonitor:
    """Asks the store every second, in a thread of its own, and says once if it does not reply.

    A store that was only silent, because its process or its host's network stood still, may reply again, which is said
    too. A connection that is closed stays closed: ranks do not connect to another store. ``failed`` is called with an
    exception of the thread that is not the store's.

    Attributes
    ----------
    status : callable, optional
        Returns what this rank says of itself for ``gossip status``, which is written every second; None writes nothing.
    is_lost : bool
        Whether the store does not reply, so that the next rank that is lost or leaves ends the training.
    """

    def __init__(self, member: int, consensus_store: ConsensusStore, failed: Callable[[Exception], object]) -> None:
        self.status: Callable[[], object] | None = None
        self.is_lost = False
        self._member = member
        self._consensus_store = consensus_store
        self._asked_at: float | None = None
        self._stop = threading.Event()
        self._thread = daemon_threads.start(
            f"gossip-store-{member}",
            daemon_threads.weak_run(self, StoreMonitor._ask),
            end=self._stop.set,
            failed=failed,
        )

    def look(self, now: float) -> None:
        """Note whether the thread has waited for long for a reply; ``now`` is of ``time.monotonic()``."""
        asked_at = self._asked_at
        if asked_at is not None and now - asked_at > STORE_PATIENCE_S:
            self._lose(f"the key-value store has not replied for {STORE_PATIENCE_S:g} s")

    def _ask(self) -> bool:
        """Ask once and wait; return whether to continue."""
        self._asked_at = time.monotonic()
        try:
            self._consensus_store.is_proposed(0)  # which waits for a reply
            if self.status is not None:
                self._consensus_store.note_status(self._member, self.status())
        except StoreLost as error:
            self._lose(str(error))
            return False
        finally:
            self._asked_at = None
        if self.is_lost:
            self.is_lost = False
            logger.warning(
                "rank {}: the key-value store replies again; ranks may be lost, leave and join", self._member
            )
        return not self._stop.wait(_INTERVAL_S)

    def _lose(self, why: str) -> None:
        if not (self.is_lost or self._stop.is_set()):
            self.is_lost = True
            logger.error(
                "rank {}: {}: the ranks keep training, but the next one that is lost or leaves ends the training of "
                "all, and none can join; save a checkpoint now",
                self._member,
                why,
            )

    def close(self) -> None:
        """End the thread, unless it waits for the store. Local."""
        self._stop.set()
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())

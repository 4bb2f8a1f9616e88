"""Consensus on who trains, in the key-value store: only when a rank is lost, leaves or joins, and without a leader.

Attempts are numbered. A rank that notices a loss, leaves or joins writes a proposal: the members without those that it
has lost, without itself, or with itself; the first proposal counts. Every rank in it, and every rank that leaves, votes
with its step, and does not go beyond this step before there is a decision. When all votes are there, the decision is
that these ranks form a generation from the step after the newest of these steps. If one of them is lost meanwhile, the
decision is that the attempt is void, and the next one begins. A decision is written once, by compare-and-set, and
reads the same for every rank, including those that learn of it late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from gossip.communication.authenticated_store import NotGenuine
from gossip.communication.host import daemon_threads
from gossip.elastic.connections.mesh import Mesh, in_words
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.elastic.consensus_store import ConsensusStore, Decision, Proposal, StoreLost, Vote, within
from gossip.elastic.flag_votes import FlagVotes, Position
from gossip.elastic.generations import Generation
from gossip.elastic.running_time import RunningTime
from gossip.elastic.store_monitor import StoreMonitor
from gossip.errors import ExchangeError, GossipError

_PAUSE_S = 0.002
_TICK_S = 0.5
_REMINDER_S = 0.1
_GRACE_S = 1.0  # how long the other side of a network partition has to make a proposal, if it is larger


class Consensus:
    """The generations of one model, and the thread that agrees on the next one.

    Parameters
    ----------
    store : Store
        A store with keys that no other model uses, on a separate connection. It must not end with a rank.
    members : sequence of int
        The members of the first generation. A rank that is not among them joins, see :meth:`ask_in`.
    timeout : timedelta
        How long an agreement waits for a rank.
    is_in_step : bool
        Whether the ranks make their steps together. If not, all steps are step 0 here, and a generation begins at once.

    Attributes
    ----------
    position : tuple of int
        The position of this rank.
    is_joint : bool
        Whether this rank is in a collective operation.
    is_new : bool
        Whether this rank has joined and made no step yet.
    flag_votes : FlagVotes
        What lost ranks had said is known to all remaining ranks once they agree on the members.

    Notes
    -----
    What the training thread calls raises ``ExchangeError`` if this rank cannot continue, because the others have
    dropped it or too few ranks remain, or if an agreement does not end in time.
    """

    def __init__(
        self,
        store: dist.Store,
        mesh: Mesh,
        members: Sequence[int],
        *,
        min_ranks: int,
        timeout: timedelta,
        is_in_step: bool = True,
    ) -> None:
        self.position: Position = (0, 0, 0)
        self.is_joint = self.is_new = False
        self.flag_votes = FlagVotes(mesh)
        self._consensus_store = ConsensusStore(store)
        self._mesh = mesh
        self._generations = [Generation(0, tuple(members))]
        self._initial = tuple(members)
        self._min_ranks = min_ranks
        self._entered = 0
        self._absent_until: dict[int, int] = {}  # ranks that have joined: the last step at which the others meet alone
        self._loaded_step: int | None = None  # by the current collective operation
        # The generation that this rank wants to join, and to whose members it is connected.
        self._asked_in: int | None = None
        self._returns = False
        self._is_leaving = False
        self._ended: set[int] = set()  # ranks that have closed their models, as others say
        self._is_dropped = False  # others have lost this rank, and will decide so
        self._leaves_at: int | None = None
        self._timeout = timeout
        self._is_in_step = is_in_step
        self._error: GossipError | None = None
        self._holds = False
        self._num_attempts = 0  # that have been decided
        self._due: tuple[int, float] | None = None  # since when there has been something to agree on, after how many
        self._alarm = 0  # the newest attempt that another rank has reported
        self._changed = threading.Condition()
        self._stop = threading.Event()
        mesh.position = lambda: self.position
        mesh.on_lost = self._on_lost
        mesh.on_failed = self.fail
        mesh.handlers[Kind.ALARM] = lambda _member, frame: self._on_alarm(frame.key.first)
        self._suspects = dict(mesh.lost)
        if mesh.member not in members:
            within(timeout, self._follow)
        run, failed = daemon_threads.weak_run(self, Consensus._turn), daemon_threads.weak_call(mesh, Mesh.fail)
        self.store_monitor = StoreMonitor(mesh.member, self._consensus_store, failed)
        name = f"gossip-consensus-{mesh.member}"
        self._thread = daemon_threads.start(name, run, end=self._stop.set, failed=failed)

    # ------------------------------------------------------------------ used by the training thread

    @property
    def latest(self) -> Generation:
        """The generation that was decided last; an error if the next one has been due for too long."""
        with self._changed:
            self._check()
            if not (self._holds or self._is_due()):
                self._due = None
            elif self._due is None or self._due[0] != self._num_attempts:
                self._due = self._num_attempts, time.monotonic()
            elif time.monotonic() - self._due[1] > self._patience_s:
                raise self._stuck(f"step {self.position[1]}")
            return self._generations[-1]

    @property
    def entered(self) -> Generation:
        """The generation of the step that this rank makes; collective operations before it may be of another one."""
        with self._changed:
            return next(each for each in reversed(self._generations) if each.number == self._entered)

    def enter_step(self, step: int) -> Generation:
        """Begin a step as soon as no agreement prevents it, and return the generation that the step belongs to."""
        with self._changed:
            self._wait_until_free(f"step {step}")
            if self._is_in_step and step != self.position[1]:
                self.position = self.position[0], step, 0
            # A checkpoint may return to an earlier step, but lost ranks do not return.
            found = (
                generation
                for generation in reversed(self._generations)
                if generation.first_step <= step or generation.number <= self._entered
            )
            generation = next(found)
            self._entered = generation.number
            return generation

    def begin_together(self) -> tuple[Generation, tuple[int, ...]]:
        """Begin a collective operation; return the latest generation, and those of its members that have made a step.

        A rank that joins, and has made none yet, is refused.
        """
        with self._changed:
            self._check()
            self._loaded_step = None
            latest, step, member = self._generations[-1], self.position[1], self._mesh.member
            here = tuple(other for other in latest.members if self._absent_until.get(other, -1) < step)
            if member in latest.members and (member not in here or self.is_new):
                raise GossipError(
                    f"rank {member}: step {step}: a rank that joins takes part in collective operations only after its "
                    "first step; begin the loop with a step, and average or save after it"
                )
            return latest, here

    def newest_that_begins(self, number: int) -> Generation:
        """Return the newest generation up to this one that can begin within a collective operation: none joins with it.

        It is the same on all ranks that take part, whichever of their attempts at the operation succeed.
        """
        with self._changed:
            step = self.position[1]
            found = (
                each
                for each in reversed(self._generations)
                if each.number <= number
                and all(self._absent_until.get(other, -1) < step for other in each.members)
                and (not each.has_first_steps or step >= each.first_step)
            )
            return next(found, self._generations[0])

    def note_loaded(self, step: int) -> None:
        """Note that the current collective operation loads a checkpoint of this step."""
        with self._changed:
            self._loaded_step = step

    def commit(self, generation: Generation, members: Collection[int]) -> bool:
        """End a collective operation of ``members`` in ``generation``; False if it must be repeated in a later one.

        To be called when all of them are known to have its outcome.
        """
        with self._changed:
            num_loaded, step, num_ended = self.position
            if not self.have_passed(members):
                self._wait_until_free(f"step {step}: ending a collective operation")
                latest = self._generations[-1]
                if latest.number != generation.number and not (
                    self.have_passed(members) or latest.furthest(members) > self.position
                ):
                    return False
            if self._loaded_step is None:
                self.position = num_loaded, step, num_ended + 1
            else:
                self.position = num_loaded + 1, self._loaded_step if self._is_in_step else 0, 0
                self._absent_until.clear()  # a rank that has not taken part is behind for good
            return True

    def wait_for_generation_after(self, number: int) -> Generation:
        """Return the generation without the member that was lost in generation ``number``."""
        with self._changed:
            self._wait_until(lambda: self._generations[-1].number > number, f"step {self.position[1]}")
            return self._generations[-1]

    def have_passed(self, members: Collection[int]) -> bool:
        """Return whether one of ``members`` was beyond this rank's position when it closed its model."""
        farewells = self._mesh.farewells
        return any(farewells[member] > self.position for member in members if member in farewells)

    def give_up(self, reasons: Mapping[int, str]) -> None:
        """Continue without members that have been silent for long, for these reasons; without all of them, or none."""
        with self._changed:
            self._suspects = {**reasons, **self._suspects}
            self._changed.notify_all()
        for member, reason in reasons.items():
            self._mesh.cut(member, reason)

    @property
    def admitted_in(self) -> Generation | None:
        """The first generation of which this rank is a member; None if it has not been admitted yet."""
        with self._changed:
            self._check()
            return next(
                (generation for generation in self._generations if self._mesh.member in generation.members), None
            )

    @property
    def asks(self) -> bool:
        """Whether this rank has asked to be admitted, and has had no reply yet."""
        return self._asked_in is not None

    def ask_in(self, number: int, *, returns: bool = False) -> None:
        """Propose that this rank, which is connected to all members of generation ``number``, joins them. Local.

        If the members have changed in the meantime, the proposal has no effect. A rank that ``returns`` is within its
        loop: what the others do together after the step before its first one, it does with them.
        """
        with self._changed:
            self._asked_in, self._returns = number, returns
            self._changed.notify_all()

    def look_up(self) -> None:
        """Look for an attempt that no rank has reported to this rank, as it is not a member yet."""
        number = self._num_attempts + 1
        if within(self._timeout, self._consensus_store.is_proposed, number):
            self._on_alarm(number)

    def leave(self) -> int:
        """Tell the others that this rank leaves; return the step before which it may, exchanging normally until then.

        Refused if too few ranks would remain.
        """
        with self._changed:
            self._check()
            self._is_leaving = True
            self._changed.notify_all()
            self._wait_until(lambda: not self._is_leaving, f"step {self.position[1]}: leaving")
            if self._leaves_at is None:
                num_others = len(self._generations[-1].members) - 1
                raise GossipError(
                    f"rank {self._mesh.member}: step {self.position[1]}: without this rank {num_others} "
                    f"would remain, fewer than min_ranks={self._min_ranks}; save a checkpoint on all ranks instead, "
                    "or pass a lower min_ranks to let the others continue"
                )
            return self._leaves_at

    def _wait_until_free(self, where: str) -> None:
        self._wait_until(lambda: not (self._holds or self._is_due()), where)

    def _wait_until(self, is_met: Callable[[], bool], where: str) -> None:
        if self._error is None and not is_met():
            with self._mesh.waits():
                number = self._num_attempts
                while not self._changed.wait_for(lambda: self._error or is_met(), self._patience_s):
                    if self._num_attempts == number:
                        raise self._stuck(where)
                    number = self._num_attempts
        self._check()

    @property
    def _patience_s(self) -> float:
        """How long an attempt may take: a rank that is frozen meanwhile is dropped after the first half."""
        return 2 * self._timeout.total_seconds()

    def _stuck(self, where: str) -> ExchangeError:
        return ExchangeError(
            f"rank {self._mesh.member}: {where}: no agreement on the remaining ranks within {self._patience_s:g} s: "
            "the key-value store does not reply, or this rank is cut off from it"
        )

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ triggers of an attempt

    def _on_lost(self, member: int, reason: str) -> None:
        with self._changed:
            self._suspects.setdefault(member, reason)
            self._changed.notify_all()

    def fail(self, error: GossipError) -> None:
        """Propose nothing from now on, and raise the error in whoever waits."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _on_alarm(self, number: int) -> None:
        with self._changed:
            self._alarm = max(self._alarm, number)
            self._changed.notify_all()

    def _is_due(self) -> bool:
        """Return whether there is something to agree on."""
        if self._error is not None:
            return False
        if self._alarm > self._num_attempts:
            return True
        if self._is_dropped:
            return True
        latest = self._generations[-1]
        lost = set(latest.members) & self._suspects.keys()
        if self._mesh.member not in latest.members:
            return self._asked_in == latest.number and not lost
        return self._is_leaving or bool(lost - self._mesh.left) or bool(self._lost_leaving(latest))

    def _lost_leaving(self, latest: Generation) -> set[int]:
        """Return the ranks that were about to leave, and were lost before: the others must learn how they had voted."""
        return set(latest.left) & self._suspects.keys() - self._mesh.farewells.keys()

    def miss(self, members: Sequence[int]) -> None:
        """Treat members that said goodbye, but are waited for, like lost ones that did not."""
        with self._mesh.changed:
            self._mesh.left.difference_update(members)
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ the thread

    def _turn(self) -> bool:
        """Wait for a while for something to agree on, and agree; return whether there may be more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._holds or self._is_due(), _TICK_S)
            is_due = self._is_due() and not self._stop.is_set()
            if self._holds and not is_due:  # whoever was lost has said goodbye
                self._holds = False
                self._changed.notify_all()
        self.store_monitor.look(time.monotonic())
        if is_due:
            try:
                self._attempt(self._num_attempts + 1)
            except (StoreLost, NotGenuine) as error:
                why = f"{error}: without it the remaining ranks cannot agree on who trains"
                self.fail(ExchangeError(f"rank {self._mesh.member}: {why}"))
        return not self._stop.is_set()

    def _attempt(self, number: int) -> None:
        member, latest = self._mesh.member, self._generations[-1]
        with self._changed:
            self._holds = True  # until it is decided: a rank that cannot reach the store must not continue alone
            proposed = self._proposed(latest)
            if self._is_leaving and proposed is not None and len(proposed.members) < self._min_ranks:
                self._is_leaving = False  # it is refused, maybe as another one leaves
                proposed = self._proposed(latest)
                self._changed.notify_all()
        if not self._consensus_store.is_proposed(number):
            is_same = proposed == Proposal(list(latest.members), [], ended=[]) and not self._lost_leaving(latest)
            if self._is_dropped:
                self._is_soon_proposed(number)
                return
            if proposed is None or is_same:  # nobody has: a false alarm
                with self._changed:
                    self._alarm, self._holds = self._num_attempts, False
                    self._changed.notify_all()
                return
            is_too_few = len(proposed.members) < self._min_ranks
            if is_too_few or 2 * len(proposed.members) < len(latest.members):  # the others may be more
                if self._is_soon_proposed(number):
                    return
                if is_too_few:
                    self.fail(self._too_few(proposed.members))
                    return
        agreed = self._consensus_store.propose(number, proposed)
        asked = {*agreed.members, *agreed.leaving}
        told = (asked | set(latest.members)) - {member}
        self._tell(told, number)
        gone = {*latest.members, *latest.left} - asked
        if member in asked:
            # Ranks that join are connected before they ask.
            unmet = self._await(asked - set(latest.members) - {member}, self._mesh.has_met)
            self.give_up(dict.fromkeys(unmet, "it did not connect"))
            self._await(
                gone & set(agreed.ended), lambda other: other in self._mesh.farewells or other in self._mesh.lost
            )
            for other in gone:
                self._mesh.cut(other, "the others continue without it")
            with self._changed:
                position = self.position
            self._consensus_store.vote(number, member, Vote(position, self.flag_votes.votes_of(gone), self.is_joint))
        decision = self._decide(number, sorted(asked), told, are_joining=not asked.issubset(latest.members))
        if decision is not None:
            self.flag_votes.take_over(decision.flag_votes)
            # A rank that others cannot reach, and this one can, would be proposed again and again.
            self._is_dropped |= member in decision.lost
            self._ended |= set(decision.ended)
            with self._changed:
                others = set(decision.lost) - {member}
                self._suspects = dict.fromkeys(others, "others lost it while they agreed") | self._suspects
        with self._changed:
            self._num_attempts = number
            self._asked_in = None
            if decision is not None and decision.positions:
                self._holds = False
                self._adopt(number, agreed, decision)
            self._holds = self._holds and self._is_due()
            self._changed.notify_all()
        with self._mesh.changed:
            self._mesh.changed.notify_all()

    def _proposed(self, latest: Generation) -> Proposal | None:
        """Return who should train, as far as this rank knows; None if it is not to be a member, or has failed."""
        member = self._mesh.member
        if self._error is not None or self._is_dropped:
            return None
        if member not in latest.members:
            is_asked = self._asked_in == latest.number and self._suspects.keys().isdisjoint(latest.members)
            joined = Proposal(sorted([*latest.members, member]), returning=[member] * self._returns)
            return joined if is_asked else None
        leaving = [member] * self._is_leaving
        members = [other for other in latest.members if other not in {*self._suspects, *leaving}]
        have_ended = self._ended | self._mesh.farewells.keys()
        ended = [other for other in latest.members if other not in members and other in have_ended]
        return Proposal(members, leaving, ended=ended)

    def _await(self, others: Iterable[int], is_met: Callable[[int], bool]) -> list[int]:
        """Wait until something is true of each of the other ranks, and return those of which it is not in time."""
        running = RunningTime(self._mesh.beat_s)
        while missing := [other for other in others if not is_met(other)]:
            if running.passed() > self._timeout.total_seconds() or self._stop.is_set():
                break
            time.sleep(_PAUSE_S)
        return missing

    def _tell(self, others: Iterable[int], number: int) -> None:
        for other in others:
            self._mesh.send(other, Key(Kind.ALARM, number))

    def _decide(self, number: int, asked: Sequence[int], told: Iterable[int], *, are_joining: bool) -> Decision | None:
        """Return the decision, or None if this thread ends before there is one.

        If ranks do not make their steps together, a rank can join only while no other is in a collective operation, and
        with a state of the same time, so that all take part in the same collective operations from then on.
        """
        running, told_at = RunningTime(self._mesh.beat_s), time.monotonic()
        while not self._consensus_store.is_decided(number):
            if time.monotonic() - told_at > _REMINDER_S:
                self._tell(told, number)  # a rank that joins may have been unconnected before
                told_at = time.monotonic()
            missing = self._consensus_store.without_vote(number, asked)
            if not missing:
                votes = self._consensus_store.votes(number, asked)
                positions = [vote.position for vote in votes.values()]
                is_between = min(positions) == max(positions) and not any(vote.is_joint for vote in votes.values())
                if are_joining and not (self._is_in_step or is_between):
                    return self._consensus_store.decide(number, Decision())
                flag_votes = [yes for vote in votes.values() for yes in vote.flag_votes]
                return self._consensus_store.decide(
                    number, Decision(list(zip(votes, positions, strict=True)), flag_votes)
                )
            if running.passed() > self._timeout.total_seconds():
                self.give_up(dict.fromkeys(missing, "it did not reply when the others agreed on who continues"))
            is_asked = self._mesh.member in asked and not self._is_dropped
            if is_asked and (lost := self._suspects.keys() & missing):
                ended = sorted(lost & self._mesh.farewells.keys())
                return self._consensus_store.decide(number, Decision(lost=sorted(lost), ended=ended))
            if self._stop.is_set():
                return None
            time.sleep(_PAUSE_S)
        return self._consensus_store.decision(number)

    def _follow(self) -> None:
        """Adopt everything that was decided before this rank came."""
        while self._consensus_store.is_decided(number := self._num_attempts + 1):
            self._num_attempts = number
            if (decision := self._consensus_store.decision(number)).positions:
                self._adopt(number, self._consensus_store.proposal(number), decision)

    def _adopt(self, number: int, agreed: Proposal, decision: Decision) -> None:
        """Adopt a decision."""
        before, member = self._generations[-1], self._mesh.member
        members, leaving, returning, _ = agreed
        generation = before.followed_by(number, members, leaving, decision.positions, is_in_step=self._is_in_step)
        self._generations.append(generation)
        first_step, joining = generation.first_step, set(members) - set(before.members)
        if self._is_in_step:
            self._absent_until |= {other: first_step - (other in returning) for other in joining}
        if member in joining:
            position = max(of_one for _, of_one in generation.positions)
            self.position = (position[0], first_step, 0) if self._is_in_step else position
            self.is_new = not self._is_in_step and member not in returning
        elif member in leaving:
            self._is_leaving, self._leaves_at = False, first_step
        elif member in before.members and member not in members:
            self._error = ExchangeError(
                f"rank {member}: the others continued without this rank from step {first_step} on: it was cut off, "
                "or had not replied for long; its state is older than theirs, and is not mixed in"
            )
        if member in members and len(members) < self._min_ranks:
            self._error = self._too_few(members)

    def _is_soon_proposed(self, number: int) -> bool:
        """Return whether another rank makes a proposal within a short time."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not self._stop.is_set():
            if self._consensus_store.is_proposed(number):
                return True
            time.sleep(_PAUSE_S)
        return False

    def _too_few(self, members: Sequence[int]) -> ExchangeError:
        gone = [other for other in self._initial if other not in members]
        missing = "; ".join(f"rank {other}: {self._suspects.get(other, 'dropped by others')}" for other in gone)
        return ExchangeError(
            f"rank {self._mesh.member}: {len(members)} of {len(self._initial)} ranks remain ({in_words(members)}), "
            f"fewer than min_ranks={self._min_ranks}; missing: {missing}. Start again from the newest checkpoint, or "
            "pass a lower min_ranks",
            failed_ranks=gone,
        )

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """End the thread. Local."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self.store_monitor.close()
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())

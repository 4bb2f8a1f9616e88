"""Consensus on who trains, in the key-value store: only when a rank is lost, leaves or joins, and without a leader.

Attempts are numbered. A rank that notices a loss, leaves or joins writes a proposal: the members without those that it
has lost, without itself, or with itself; the first proposal counts. Every rank in it, and every rank that leaves, votes
with its step, and does not go beyond this step before there is a decision. When all votes are there, the decision is
that these ranks form a generation from the step after the newest of these steps, or, if some leave while others are in
a collective operation before this newest step, from that step on. If one of them is lost meanwhile, the decision is
that the attempt is void, and the next one begins. A decision is written once, by compare-and-set, and reads the same
for every rank, including those that learn of it late.

Ranks that hold a replica together are members together: a shard group is lost, leaves and joins as a whole.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from gossip.communication.authenticated_store import NotGenuine
from gossip.elastic.connections.mesh import Mesh, in_words
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.elastic.consensus_store import ConsensusStore, Decision, Proposal, StoreLost, Vote
from gossip.elastic.flag_votes import FlagVotes, Position
from gossip.elastic.generations import Generation
from gossip.elastic.store_monitor import StoreMonitor
from gossip.errors import ExchangeError, GossipError

_PAUSE_S = 0.002
_TICK_S = 0.5
_REMINDER_S = 0.1
_GRACE_S = 1.0  # for the proposal of the other side of a network partition, if it is larger and knows of it
_NUM_BEATS_MISSED = 3
SILENT = 0.9
"""For so many time-outs a rank that is lost has been silent."""


class RunningTime:
    """The time that passes while this process runs.

    A process that stood still, because it was stopped or its host was suspended, must not conclude from the time that
    others have been silent: it has not looked. An interval between two looks counts at most ``most_s``.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._looked_at = time.monotonic()
        self._seconds = 0.0

    def passed(self) -> float:
        """Look at the clock, and return the seconds that have passed so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._seconds


class MembershipProtocol:
    """The thread of :class:`gossip.elastic.membership_consensus.Consensus`, which proposes, votes and decides."""

    store_monitor: StoreMonitor
    _suspects: dict[int, str]

    def __init__(
        self,
        store: dist.Store,
        mesh: Mesh,
        members: Sequence[int],
        *,
        min_ranks: int,
        timeout: timedelta,
        group_size: int = 1,
        is_in_step: bool = True,
        ends_if_preempted: bool = False,
    ) -> None:
        self.position: Position = (0, 0, 0)
        self.is_joint = self.is_new = False
        self.flag_votes = FlagVotes(mesh)
        self._consensus_store = ConsensusStore(store)
        self._mesh = mesh
        self._generations = [Generation(0, tuple(members))]
        self._initial = tuple(members)
        self._group_size, self._min_ranks = group_size, min_ranks * group_size
        self._given_up: set[int] = set()  # ranks that may train on and not know that they are lost
        self._absent_until: dict[int, int] = {}  # ranks that have joined: the last step at which the others meet alone
        # The generation that this rank wants to join, and to whose members it is connected.
        self._asked_in: int | None = None
        self._mates_asked_in: dict[int, int] = {}  # the same of the other ranks of its shard group
        self._returns = False
        self._is_leaving = False
        self._ended: set[int] = set()  # ranks that have closed their models, as others say
        self._farewells: dict[int, Position] = {}  # and where they were, as the voters of a generation knew
        self._is_dropped = False  # others have lost this rank, and will decide so
        self._is_left_out = False  # by those who were asked in the last attempt, and have cut this rank
        self._leaves_at: int | None = None
        self._ends_if_preempted = ends_if_preempted
        #: The step before which all ranks end together, since too many have received SIGTERM; None if they do not.
        self.ends_at: int | None = None
        self._is_ending = False  # whether the members have agreed to end together
        self._begun: Position | None = None
        self._preempted: set[int] = set()  # ranks that have received SIGTERM
        self._timeout = timeout
        self._is_in_step = is_in_step
        self._error: GossipError | None = None
        self._error_after: GossipError | None = None  # the current operation, which this rank still ends
        self._holds = False
        self._num_attempts = 0  # that have been decided
        self._alarm = 0  # the newest attempt that another rank has reported
        self._changed = threading.Condition()
        self._stop = threading.Event()

    def fail(self, error: GossipError) -> None:
        """Propose nothing from now on, and raise the error in whoever waits."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _fail_with_group(self, lost: Mapping[int, str]) -> None:
        """Continue no more if a rank of the own shard group is lost."""
        for member in sorted(self._own_group() & lost.keys()):
            self.fail(
                ExchangeError(
                    f"rank {self._mesh.member}: rank {member} of its shard group was lost ({lost[member]}): without it "
                    "the replica is incomplete; the other groups continue without this one",
                    failed_ranks=(member,),
                )
            )

    def give_up(self, reasons: Mapping[int, str]) -> None:
        """Continue without members that have been silent for long, for these reasons; without all of them, or none."""
        self._fail_with_group(reasons)
        with self._changed:
            self._given_up |= reasons.keys()
            self._suspects = {**reasons, **self._suspects}
            self._changed.notify_all()
        for member, reason in reasons.items():
            self._mesh.cut(member, reason)

    def _is_due(self) -> bool:
        """Return whether there is something to agree on."""
        if self._error is not None or self._error_after is not None:
            return False
        if self._alarm > self._num_attempts:
            return True
        if self._is_dropped:
            return True
        latest = self._generations[-1]
        lost = set(latest.members) & self._suspects.keys()
        if self._mesh.member not in latest.members:
            return self._may_join(latest)
        is_changing = self._is_leaving or bool(lost - self._mesh.left) or bool(self._lost_leaving(latest))
        return is_changing or self._must_end(latest)

    def _must_end(self, latest: Generation) -> bool:
        """Return whether so many ranks have received SIGTERM that too few would remain, and all are to end together."""
        if not self._preempted or not self._ends_if_preempted or self.ends_at is not None:
            return False
        present = self._of_whole_groups(latest.members, self._suspects)
        num_remaining = len(self._of_whole_groups(present, self._preempted))
        return num_remaining < self._min_ranks <= len(present)

    def _lost_leaving(self, latest: Generation) -> set[int]:
        """Return the ranks that were about to leave, and were lost before: the others must learn how they had voted."""
        return {member for member in latest.left if member in self._suspects and member not in self._mesh.farewells}

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

        def is_answered(proposed: Proposal) -> bool:
            with self._changed:
                is_another = self._proposed(latest) != proposed
            return is_another or (is_unsure and not self._may_be_cut_off(proposed.members))

        if not self._consensus_store.is_proposed(number):
            if self._is_dropped:
                self._is_soon_proposed(number)
                return
            if self._is_left_out:  # those who were asked try again, if any of them is there
                self._is_left_out = self._is_soon_proposed(number)
                return
            is_same = proposed is None or proposed._replace(ended=(), parting=()) == Proposal(list(latest.members), [])
            if proposed is None or (is_same and not self._lost_leaving(latest)):  # nobody has: a false alarm
                with self._changed:
                    self._alarm, self._holds = self._num_attempts, False
                    self._changed.notify_all()
                return
            is_unsure = self._may_be_cut_off(proposed.members)
            is_too_few = len(proposed.members) < self._min_ranks
            is_minority = 2 * len(proposed.members) < len(latest.members)
            if is_unsure or is_too_few or is_minority:  # the others may be more
                # A rank that is cut off while it waits for the others gives them up first: they begin to wait now.
                is_early = is_minority and not is_too_few and not self._given_up.isdisjoint(latest.members)
                more_s = is_early * self._timeout.total_seconds()
                if self._is_soon_proposed(number, more_s, lambda: is_answered(proposed)) or is_unsure:
                    return
                if is_too_few:
                    self.fail(self._too_few(proposed.members))
                    return
        agreed = self._consensus_store.propose(number, proposed)
        asked = {*agreed.members, *agreed.leaving}
        told = (asked | set(latest.members)) - {member}
        self._tell(told, Key(Kind.ALARM, number))
        gone = {*latest.members, *latest.left} - asked - {*agreed.parting}
        if member in asked:
            # Ranks that join are connected before they ask.
            unmet = self._await(asked - set(latest.members) - {member}, self._mesh.has_met)
            self.give_up(dict.fromkeys(unmet, "it did not connect"))
            parted = [other for other in gone & set(agreed.ended) if self._mesh.has_met(other)]
            self._await(parted, lambda other: other in self._mesh.farewells or other in self._mesh.lost)
            left_out = dict.fromkeys(gone, "the others continue without it")
            for other, reason in left_out.items():
                self._mesh.cut(other, reason)
            with self._changed:
                self._suspects = left_out | self._suspects  # the next attempt, too, is to do without them
                position, is_joint = self.position, self.is_joint
            farewells = [(other, at) for other, at in self._mesh.farewells.items() if other in gone]
            vote = Vote(position, self.flag_votes.votes_of(gone), farewells, is_joint)
            self._consensus_store.vote(number, member, vote)
        decision = self._decide(number, sorted(asked), told, are_joining=not asked.issubset(latest.members))
        if decision is not None:
            self.flag_votes.take_over(decision.flag_votes)
            # A rank that others cannot reach, and this one can, would be proposed again and again.
            self._is_dropped |= member in decision.lost
            self._ended |= set(decision.ended)
            with self._changed:
                self._farewells |= {other: (loads, step, ends) for other, (loads, step, ends) in decision.farewells}
                others = set(decision.lost) - {member}
                self._suspects = dict.fromkeys(others, "others lost it while they agreed") | self._suspects
        with self._changed:
            self._num_attempts = number
            self._is_left_out = member in latest.members and member not in asked
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
        have_ended = self._ended | self._mesh.farewells.keys()
        parting = [other for other in latest.left if other not in self._suspects.keys() | have_ended]
        ended = [other for other in latest.left if other in have_ended]
        if member not in latest.members:
            joined, returning = sorted({*latest.members, *self._own_group()}), [member] * self._returns
            return Proposal(joined, (), returning, ended, parting=parting) if self._may_join(latest) else None
        is_last = self._must_end(latest)
        leaving = sorted(self._own_group()) if self._is_leaving and not is_last else []
        members = self._of_whole_groups(latest.members, {*self._suspects, *leaving})
        ended += [other for other in latest.members if other not in members and other in have_ended]
        return Proposal(members, leaving, ended=ended, is_last=is_last, parting=parting)

    def _may_join(self, latest: Generation) -> bool:
        """Return whether all ranks of this shard group are connected to all members of a generation, and ask to join.

        The members would otherwise wait for one of them, and be given up by the others meanwhile.
        """
        own = self._own_group()
        asked_in = {**self._mates_asked_in, self._mesh.member: self._asked_in}
        have_asked = all(asked_in.get(mate) == latest.number for mate in own)
        return have_asked and self._suspects.keys().isdisjoint({*latest.members, *own})

    def _group_of(self, member: int) -> int:
        """Return the number of a rank's shard group, which is its own number if it holds a replica alone."""
        return member // self._group_size

    def _of_whole_groups(self, members: Iterable[int], missing: Iterable[int]) -> list[int]:
        """Return those of ``members`` whose shard groups lack none of their ranks."""
        incomplete = set(map(self._group_of, missing))
        return [member for member in members if self._group_of(member) not in incomplete]

    def _own_group(self) -> set[int]:
        first = self._group_of(self._mesh.member) * self._group_size
        return set(range(first, first + self._group_size))

    def _may_be_cut_off(self, members: Iterable[int]) -> bool:
        """Return whether the others must come first, as they may have lost this rank and hear each other.

        So it is if one of ``members`` is lost by now, if one of them or of the own shard group is silent, for which
        others may have waited, or if a rank of that group has stood still. Who is silent for long is given up.
        """
        silent = {other: self._mesh.silent_s(other) for other in {*members, *self._own_group()} - {self._mesh.member}}
        most_s = self._timeout.total_seconds() * SILENT
        lost = {other: f"nothing was heard from it for {most_s:.3g} s" for other in silent if silent[other] > most_s}
        if lost:
            self.give_up(lost)
        is_lost = not self._suspects.keys().isdisjoint(members)
        # Those who have waited while a rank of this group stood still may give it up within a time-out.
        thawed = max(self._mesh.thawed[mate] for mate in self._own_group())
        has_just_woken = time.monotonic() < max(thawed + self._timeout.total_seconds(), self._mesh.woke_at + _GRACE_S)
        # Its other thread has yet to find that this process has stood still.
        is_waking = time.monotonic() > self._mesh.looked_at + self._timeout.total_seconds() / 2
        is_silent = max(silent.values(), default=0.0) > _NUM_BEATS_MISSED * self._mesh.beat_s
        return is_lost or has_just_woken or is_waking or is_silent

    def _await(self, others: Iterable[int], is_met: Callable[[int], bool]) -> list[int]:
        """Wait until something is true of each of the other ranks, and return those of which it is not in time."""
        running = RunningTime(self._mesh.beat_s)
        while missing := [other for other in others if not is_met(other)]:
            if running.passed() > self._timeout.total_seconds() or self._stop.is_set():
                break
            time.sleep(_PAUSE_S)
        return missing

    def _tell(self, others: Iterable[int], key: Key) -> None:
        for other in others:
            self._mesh.send(other, key)

    def _decide(self, number: int, asked: Sequence[int], told: Iterable[int], *, are_joining: bool) -> Decision | None:
        """Return the decision, or None if this thread ends before there is one.

        If ranks do not make their steps together, a rank can join only while no other is in a collective operation, and
        with a state of the same time, so that all take part in the same collective operations from then on.
        """
        running, told_at = RunningTime(self._mesh.beat_s), time.monotonic()
        while not self._consensus_store.is_decided(number):
            if time.monotonic() - told_at > _REMINDER_S:
                self._tell(told, Key(Kind.ALARM, number))  # a rank that joins may have been unconnected before
                told_at = time.monotonic()
            missing = self._consensus_store.without_vote(number, asked)
            if not missing:
                votes = self._consensus_store.votes(number, asked)
                positions = [vote.position for vote in votes.values()]
                is_between = min(positions) == max(positions) and not any(vote.is_joint for vote in votes.values())
                if are_joining and not (self._is_in_step or is_between):
                    return self._consensus_store.decide(number, Decision())
                flag_votes = [yes for vote in votes.values() for yes in vote.flag_votes]
                farewells = [farewell for vote in votes.values() for farewell in vote.farewells]
                begun = max((vote.position for vote in votes.values() if vote.is_joint), default=None)
                noted = list(zip(votes, positions, strict=True))
                return self._consensus_store.decide(number, Decision(noted, flag_votes, farewells, begun=begun))
            if running.passed() > self._timeout.total_seconds():
                self.give_up(dict.fromkeys(missing, "it did not reply when the others agreed on who continues"))
            # A rank that cannot continue, or is about to rejoin, ends its connections itself.
            is_asked = self._mesh.member in asked and not self._is_dropped and self._error is None
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
        members, leaving, returning, _, is_last, parting = agreed
        generation = before.followed_by(
            number, members, leaving, parting, decision.positions, begun=decision.begun, is_in_step=self._is_in_step
        )
        dropped = None
        if member in before.members and member not in (*members, *leaving):
            dropped = ExchangeError(
                f"rank {member}: the others continued without this rank from step {generation.first_step} on: it was "
                "cut off, or had not replied for long; its state is older than theirs, and is not mixed in"
            )
        if dropped is not None and not self._own_group().isdisjoint(agreed.ended):
            self._error_after = dropped  # ranks of its shard group have ended, as this one is about to
            return
        self._generations.append(generation)
        self._is_ending |= is_last
        first_step, joining = generation.first_step, set(members) - set(before.members)
        if is_last and member in members and self.ends_at is None:
            self.ends_at, self._is_leaving = first_step, False
            if decision.begun is not None:
                num_loaded, step, num_ended = decision.begun
                self._begun = num_loaded, step, num_ended
        if self._is_in_step:
            self._absent_until |= {other: first_step - (other in returning) for other in joining}
        if member in joining:
            position = max(of_one for _, of_one in generation.positions)
            self.position = (position[0], first_step, 0) if self._is_in_step else position
            self.is_new = not self._is_in_step and member not in returning
        elif member in leaving:
            self._is_leaving, self._leaves_at = False, first_step
        self._error = self._error or dropped
        if member in members and len(members) < self._min_ranks:
            self._error = self._too_few(members)

    def _is_soon_proposed(self, number: int, more_s: float = 0.0, unless: Callable[[], bool] = lambda: False) -> bool:
        """Return whether another rank makes a proposal within a short time and more, or this one need not wait."""
        deadline = time.monotonic() + _GRACE_S + more_s
        while time.monotonic() < deadline and not self._stop.is_set():
            if self._consensus_store.is_proposed(number) or unless():
                return True
            time.sleep(_PAUSE_S)
        return False

    def _too_few(self, members: Sequence[int]) -> ExchangeError:
        gone = [other for other in self._initial if other not in members]
        missing = "; ".join(f"rank {other}: {self._suspects.get(other, 'dropped by others')}" for other in gone)
        size, what = self._group_size, "shard groups" if self._group_size > 1 else "ranks"
        remain = f"{len(members) // size} of {len(self._initial) // size} {what} remain"
        return ExchangeError(
            f"rank {self._mesh.member}: {remain} ({in_words(members)}), "
            f"fewer than min_ranks={self._min_ranks // size}; missing: {missing}. Start again from the newest "
            "checkpoint, or pass a lower min_ranks",
            failed_ranks=gone,
        )

"""The generations of one model, as the training thread sees them; ``membership_protocol`` agrees on the next one."""

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossip.communication.host import daemon_threads
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.elastic.consensus_store import within
from gossip.elastic.generations import Generation
from gossip.elastic.membership_protocol import MembershipProtocol
from gossip.elastic.store_monitor import StoreMonitor
from gossip.errors import CannotJoinError, ExchangeError, GossipError


class Consensus(MembershipProtocol):
    """The generations of one model, and the thread that agrees on the next one.

    Parameters
    ----------
    store : Store
        A store with keys that no other model uses, on a separate connection. It must not end with a rank.
    members : sequence of int
        The members of the first generation. A rank that is not among them joins, see :meth:`ask_in`.
    min_ranks : int
        Training ends with an error when fewer remain, in ranks or shard groups.
    timeout : timedelta
        How long an agreement waits for a rank.
    group_size : int
        How many ranks, with consecutive numbers, hold a replica together: a shard group trains as a whole or not.
    is_in_step : bool
        Whether the ranks make their steps together. If not, all steps are step 0 here, and a generation begins at once.
    ends_if_preempted : bool
        Whether all ranks end together once so many have received SIGTERM that too few would remain.

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
        self, store: dist.Store, mesh: Mesh, members: Sequence[int], *, timeout: timedelta, **options: Any
    ) -> None:
        super().__init__(store, mesh, members, timeout=timeout, **options)
        self._entered = 0
        self._loaded_step: int | None = None  # by the current collective operation
        self.apart: tuple[int, ...] = ()  # ranks that leave, and have missed a collective operation of this step
        self._has_asked_to_leave = False
        self._due: tuple[int, float] | None = None  # since when there has been something to agree on, after how many
        mesh.position = lambda: self.position
        mesh.on_lost = self._on_lost
        mesh.on_failed = self.fail
        mesh.handlers[Kind.ALARM] = lambda _member, frame: self._on_alarm(frame.key.first)
        mesh.handlers[Kind.PREEMPTED] = lambda member, _frame: self._on_preempted(member)
        mesh.handlers[Kind.ASKED_IN] = lambda member, frame: self._on_asked_in(member, frame.key.first)
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
        """The generation that was decided last; an error, which is final, if the next one has been due for too long."""
        with self._changed:
            if self._is_free():
                self._due = None
            elif self._due is None or self._due[0] != self._num_attempts:
                self._due = self._num_attempts, time.monotonic()
            elif time.monotonic() - self._due[1] > self._patience_s:
                self._fail_stuck(f"step {self.position[1]}")
            self._check()
            return self._generations[-1]

    @property
    def entered(self) -> Generation:
        """The generation of the step that this rank makes; collective operations before it may be of another one."""
        with self._changed:
            return next(each for each in reversed(self._generations) if each.number == self._entered)

    def enter_step(self, step: int) -> Generation:
        """Begin a step as soon as no agreement prevents it, and return the generation that the step belongs to."""
        self._mesh.step = step
        with self._changed:
            self._wait_until(self._is_free, f"step {step}")
            if self._is_in_step and step != self.position[1]:
                self.position, self.apart = (self.position[0], step, 0), ()
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
            self._wait_until(self._is_free, f"step {self.position[1]}: beginning a collective operation")
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
        """Return the newest generation up to this one that can begin within a collective operation.

        None joins with it, and none of its members is about to leave, as these take no part. It is the same on all
        ranks that take part, whichever of their attempts at the operation succeed.
        """
        with self._changed:
            step = self.position[1]
            leaving = {other for each in self._generations if each.first_step > step for other in each.left}
            found = (
                each
                for each in reversed(self._generations)
                if each.number <= number
                and leaving.isdisjoint(each.members)
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
                where = f"step {step}: ending a collective operation"
                self._wait_until(lambda: self._is_free() or self.have_passed(members), where)
                if self._generations[-1].number != generation.number and not (
                    self.have_passed(members) or self.were_ahead(members, generation.number)
                ):
                    return False
            self.is_joint = False  # with the position: a vote must not say that the next operation has begun
            if self._loaded_step is None:
                self.position, self.apart = (num_loaded, step, num_ended + 1), (*self.apart, *generation.left)
            else:
                self.position = num_loaded + 1, self._loaded_step if self._is_in_step else 0, 0
                self._absent_until.clear()  # a rank that has not taken part is behind for good
            return True

    def wait_for_generation_after(self, number: int, *, unless: Callable[[], bool] = lambda: False) -> Generation:
        """Return the generation without the member that was lost in generation ``number``.

        It is not waited for if ``unless`` returns True, now or after others have said goodbye.
        """
        with self._changed:
            self._wait_until(lambda: self._generations[-1].number > number or unless(), f"step {self.position[1]}")
            return self._generations[-1]

    def have_passed(self, members: Collection[int]) -> bool:
        """Return whether one of ``members`` was beyond this rank's position when it closed its model."""
        farewells = self._farewells | self._mesh.farewells
        return any(farewells[member] > self.position for member in members if member in farewells)

    def were_ahead(self, members: Collection[int], number: int) -> bool:
        """Return whether one of ``members`` was beyond this rank's position in an agreement after that generation.

        Not only in the latest one, in which a rank that has left since does not vote.
        """
        with self._changed:
            later = (each for each in self._generations if each.number > number)
            votes = (vote for each in later for vote in each.positions)
            return any(member in members and position > self.position for member, position in votes)

    @property
    def admitted_in(self) -> Generation | None:
        """The first generation of which this rank is a member; None if it has not been admitted yet."""
        with self._changed:
            self._check()
            return next(
                (generation for generation in self._generations if self._mesh.member in generation.members), None
            )

    def steps_before_joining(self, member: int) -> int:
        """Return how many steps a member makes before the first one of this rank, which has joined; 0 afterwards."""
        first_step = self._absent_until.get(self._mesh.member, -1) + self._returns
        positions = dict(self._generations[-1].positions)
        return 0 if self.position[1] > first_step or member not in positions else first_step - positions[member][1]

    @property
    def is_left_behind(self) -> bool:
        """Whether the others continue without this rank, which ends its current operation and learns of no other."""
        return self._error_after is not None

    @property
    def asks(self) -> bool:
        """Whether this rank has asked to be admitted, and has had no reply yet."""
        return self._asked_in is not None

    def ask_in(self, number: int, *, returns: bool = False) -> None:
        """Propose that this rank, which is connected to all members of generation ``number``, joins them. Local.

        A shard group is proposed when each of its ranks has asked. If the members have changed in the meantime, the
        proposal has no effect. A rank that ``returns`` is within its loop: what the others do together after the step
        before its first one, it does with them. CannotJoinError if all are about to end together.
        """
        with self._changed:
            if self._is_ending:
                raise CannotJoinError(f"rank {self._mesh.member}: joining: so many ranks were told to end that all do")
            is_told, self._returns = self._asked_in == number, returns
            self._asked_in = number
            self._changed.notify_all()
        if not is_told:
            self._tell(self._own_group() - {self._mesh.member}, Key(Kind.ASKED_IN, number))

    def look_up(self) -> None:
        """Look for an attempt that no rank has reported to this rank, as it is not a member yet."""
        number = self._num_attempts + 1
        if within(self._timeout, self._consensus_store.is_proposed, number):
            self._on_alarm(number)

    def leave(self, *, waits: bool = True) -> int | None:
        """Tell the others that this rank leaves; return the step before which it may, exchanging normally until then.

        Unless this rank ``waits``, None as long as there is no agreement. GossipError if too few ranks would remain.
        """
        with self._changed:
            self._check()
            if not self._has_asked_to_leave or waits:
                self._has_asked_to_leave = True
                # Another rank of the shard group may have said so, or all may be about to end together.
                self._is_leaving = self._leaves_at is None and self.ends_at is None
                self._changed.notify_all()
            if self._is_leaving and not waits:
                return None
            self._wait_until(lambda: not self._is_leaving, f"step {self.position[1]}: leaving")
            if self._leaves_at is None:
                size = self._group_size
                at = f"rank {self._mesh.member}: step {self.position[1]}: "
                if self.ends_at is not None:
                    raise GossipError(f"{at}so many ranks were told to end that all do, before step {self.ends_at}")
                num_others = len(self._generations[-1].members) // size - 1
                raise GossipError(
                    f"{at}without this {'shard group' if size > 1 else 'rank'} {num_others} "
                    f"would remain, fewer than min_ranks={self._min_ranks // size}; save a checkpoint on all ranks "
                    "instead, or pass a lower min_ranks to let the others continue"
                )
            return self._leaves_at

    @property
    def has_left(self) -> bool:
        """Whether the others continue without this rank, which has left."""
        return self._leaves_at is not None and self.position[1] >= self._leaves_at

    @property
    def can_end(self) -> bool:
        """Whether all ranks end together, and this one is beyond the collective operations that any of them had begun.

        Otherwise a rank might exchange as those that have begun one do, and others as those that have not.
        """
        has_begun = self._begun is not None and self.position <= self._begun
        return self.ends_at is not None and self._loaded_step is None and not has_begun

    def tell_of_preemption(self) -> None:
        """Tell the others that this rank has received SIGTERM. Local."""
        with self._changed:
            is_told = self._mesh.member in self._preempted
            members = self._generations[-1].members
        if not is_told:
            self._on_preempted(self._mesh.member)
            self._tell(set(members) - {self._mesh.member}, Key(Kind.PREEMPTED))

    def _is_free(self) -> bool:
        """Return whether no agreement is due, or in progress."""
        return not (self._holds or self._is_due())

    def _wait_until(self, is_met: Callable[[], bool], where: str) -> None:
        self._error = self._error or self._error_after
        if self._error is None and not is_met():
            with self._mesh.waits():
                number = self._num_attempts
                while not self._changed.wait_for(lambda: self._error or is_met(), self._patience_s):
                    if self._num_attempts == number:
                        self._fail_stuck(where)
                    number = self._num_attempts
        self._check()

    @property
    def _patience_s(self) -> float:
        """How long an attempt may take: a rank that is frozen meanwhile is dropped after the first half."""
        return 2 * self._timeout.total_seconds()

    def _fail_stuck(self, where: str) -> None:
        """Fail for good: what this rank then did without an agreement is not undone by one that comes after all."""
        text = f"rank {self._mesh.member}: {where}: no agreement on the remaining ranks within {self._patience_s:g} s: "
        self.fail(ExchangeError(f"{text}the key-value store does not reply, or this rank is cut off from it"))

    def check(self) -> None:
        """Raise the reason why this rank cannot continue, if there is one."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ triggers of an attempt

    def _on_lost(self, member: int, reason: str) -> None:
        if member not in self._mesh.left:
            self._fail_with_group({member: reason})
        with self._changed:
            self._suspects.setdefault(member, reason)
            self._changed.notify_all()

    def _on_asked_in(self, mate: int, number: int) -> None:
        with self._changed:
            self._mates_asked_in[mate] = number
            self._changed.notify_all()

    def _on_alarm(self, number: int) -> None:
        with self._changed:
            self._alarm = max(self._alarm, number)
            self._changed.notify_all()

    def _on_preempted(self, member: int) -> None:
        with self._changed:
            self._preempted.add(member)
            self._changed.notify_all()

    def miss(self, members: Sequence[int]) -> None:
        """Treat members that said goodbye, but are waited for, like lost ones that did not."""
        with self._mesh.changed:
            self._mesh.left.difference_update(members)
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """End the thread. Local."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self.store_monitor.close()
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())

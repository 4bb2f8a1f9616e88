"""Who is left, agreed on in the key-value store: only when somebody is lost, and by nobody in particular.

Attempts are numbered. Whoever notices a loss writes a proposal, the members without those that it has lost; the first
one counts. Every member of it notes its step, which it will not leave before there is a decision. With all notes there
the decision is that they form an epoch from the step after the newest of these; if one of them is lost meanwhile, that
the attempt is void, and the next one begins. What is decided is written once, by compare-and-set, and reads alike for
everybody, also for those who learn of it late.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossip.communication import daemon_threads
from gossip.communication.survivors.mesh import Mesh, in_words, weak_run
from gossip.communication.survivors.peer_connection import Key, Kind
from gossip.errors import ExchangeError

_PAUSE_S = 0.002
_TICK_S = 0.5
_GRACE_S = 1.0  # for the ranks on the other side of a cut, if these are more, to say so


@dataclass(frozen=True)
class Epoch:
    """Steps that the same ranks make.

    Attributes
    ----------
    number : int
        0 at the beginning; later ones grow, not always by 1.
    members : tuple of int
        Who trains, by their ranks at the beginning; their places here are their ranks in the topology.
    first_step : int
        Steps from this one on belong to it, unless a later epoch has them.
    num_committed : int
        How many operations of all ranks together had ended by then, at some member at least.
    """

    number: int
    members: tuple[int, ...]
    first_step: int = 0
    num_committed: int = 0


class Agreement:
    """The epochs of one model, and the thread that agrees on the next one.

    Parameters
    ----------
    store : Store
        Of keys that no other model uses, on a connection of its own. It must not die with a rank.
    mesh : Mesh
    members : sequence of int
        Of the first epoch.
    min_ranks : int
        With fewer the training ends.
    timeout : timedelta

    Attributes
    ----------
    step : int
        The step that this rank is in.
    num_committed : int
        How many operations of all ranks together have ended here.
    """

    def __init__(
        self, store: dist.Store, mesh: Mesh, members: Sequence[int], *, min_ranks: int, timeout: timedelta
    ) -> None:
        self.step = 0
        self.num_committed = 0
        self._store: Any = store
        self._mesh = mesh
        self._epochs = [Epoch(0, tuple(members))]
        self._initial = tuple(members)
        self._min_ranks = min_ranks
        self._entered = 0
        self._timeout = timeout
        self._error: ExchangeError | None = None
        self._holds = False
        self._num_attempts = 0  # that have been decided
        self._alarm = 0  # the newest attempt that somebody has told of
        self._changed = threading.Condition()
        self._stop = threading.Event()
        mesh.on_lost = self._on_lost
        mesh.on_alarm = self._on_alarm
        self._suspects = dict(mesh.lost)
        self._thread = daemon_threads.start(
            f"gossip-agreement-{mesh.member}", weak_run(self, Agreement._turn), end=self._stop.set
        )

    # ------------------------------------------------------------------ for the training thread

    @property
    def latest(self) -> Epoch:
        """The epoch that was decided last.

        Raises
        ------
        ExchangeError
            This rank cannot go on: it was given up by the others, or too few are left.
        """
        with self._changed:
            self._check()
            return self._epochs[-1]

    def enter_step(self, step: int) -> Epoch:
        """Begin step ``step``, as soon as no agreement holds it up; the epoch that it belongs to.

        Raises
        ------
        ExchangeError
            This rank cannot go on, or an agreement does not end.
        """
        with self._changed:
            self._wait_until_free(f"step {step}")
            self.step = step
            # A checkpoint may take it back to an earlier step, but nobody back who is lost.
            found = (
                epoch for epoch in reversed(self._epochs) if epoch.first_step <= step or epoch.number <= self._entered
            )
            epoch = next(found)
            self._entered = epoch.number
            return epoch

    def commit(self, epoch: Epoch) -> bool:
        """End an operation of all ranks that was done in ``epoch``; False if it must be repeated in a later one.

        To be called when all of its members are known to have its outcome.
        """
        with self._changed:
            self._wait_until_free(f"step {self.step}: ending what all ranks do together")
            latest = self._epochs[-1]
            if latest.number != epoch.number and latest.num_committed <= self.num_committed:
                return False
            self.num_committed += 1
            return True

    def wait_for_epoch_after(self, number: int) -> Epoch:
        """The epoch in which somebody who was lost in epoch ``number`` is no longer a member.

        Raises
        ------
        ExchangeError
            There is none in time, or this rank is no member of it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or self._epochs[-1].number > number, self._seconds()):
                raise self._stuck(f"step {self.step}")
            self._check()
            return self._epochs[-1]

    def give_up(self, member: int, reason: str) -> None:
        """Go on without a member that has not been heard of for long."""
        self._mesh.cut(member, reason)
        self._on_lost(member, reason)

    def _wait_until_free(self, where: str) -> None:
        if not self._changed.wait_for(lambda: self._error or not self._holds, self._seconds()):
            raise self._stuck(where)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _seconds(self) -> float:
        return 2 * self._timeout.total_seconds()  # who is frozen meanwhile is given up after the first half

    def _stuck(self, where: str) -> ExchangeError:
        return ExchangeError(
            f"rank {self._mesh.member}: {where}: no agreement on who is left within {self._seconds():g} s: the "
            "key-value store does not answer, or this rank is cut off from it"
        )

    # ------------------------------------------------------------------ what starts an attempt

    def _on_lost(self, member: int, reason: str) -> None:
        with self._changed:
            self._suspects.setdefault(member, reason)
            self._changed.notify_all()

    def _on_alarm(self, number: int) -> None:
        with self._changed:
            self._alarm = max(self._alarm, number)
            self._changed.notify_all()

    def _is_due(self) -> bool:
        """Whether there is something to agree on."""
        if self._error is not None:
            return False
        missing = (set(self._epochs[-1].members) & self._suspects.keys()) - self._mesh.left
        return bool(missing) or self._alarm > self._num_attempts

    def miss(self, members: Sequence[int]) -> None:
        """Somebody is waited for who said goodbye: he is lost like one who did not."""
        with self._mesh.changed:
            self._mesh.left.difference_update(members)
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ the thread

    def _turn(self) -> bool:
        """Wait for a while for something to agree on, and agree; whether there may be more."""
        with self._changed:
            is_due = self._changed.wait_for(lambda: self._stop.is_set() or self._is_due(), _TICK_S)
            is_due = is_due and not self._stop.is_set()
        if is_due:
            try:
                self._attempt(self._num_attempts + 1)
            except Exception as error:  # of a store, whose errors have no type of their own
                self._fail(
                    f"the key-value store does not answer ({str(error).partition(chr(10))[0]}): without it the ranks "
                    "that are left cannot agree on who they are"
                )
        return not self._stop.is_set()

    def _attempt(self, number: int) -> None:
        member, latest = self._mesh.member, self._epochs[-1]
        with self._changed:
            self._holds = True  # from here on: who cannot reach the store must not train on by himself
            proposed = [other for other in latest.members if other not in self._suspects]
        if len(proposed) < self._min_ranks and not self._is_there(f"proposal/{number}"):
            self._fail_as_too_few(proposed)  # and leave it to others, who may be more
            return
        members = self._set_once(f"proposal/{number}", proposed)
        for other in latest.members:
            if other != member:
                self._mesh.send(other, Key(Kind.ALARM, number))
        if member in members:
            with self._changed:
                note = [self.step, self.num_committed]
            self._store.set(f"note/{number}/{member}", json.dumps(note))
        decision = self._decide(number, members)
        with self._changed:
            self._num_attempts = number
            if decision is not None:
                self._holds = False
                self._adopt(Epoch(number, tuple(members), *decision))
            self._holds = self._holds and self._is_due()
            self._changed.notify_all()
        for other in set(latest.members) - set(members) if decision is not None else ():
            self._mesh.cut(other, "the others went on without it")

    def _decide(self, number: int, members: Sequence[int]) -> list[int] | None:
        """First step and number of operations that have ended, or None if the attempt is void."""
        member, key = self._mesh.member, f"decision/{number}"
        notes = {other: f"note/{number}/{other}" for other in members}
        deadline = time.monotonic() + self._timeout.total_seconds()
        decision: list[int] | None
        while not self._is_there(key):
            missing = [other for other, note in notes.items() if not self._is_there(note)]
            if not missing:
                found = [json.loads(self._store.get(note)) for note in notes.values()]
                decision = [max(step for step, _ in found) + 1, max(committed for _, committed in found)]
                decision = self._set_once(key, decision)
                return decision
            if time.monotonic() > deadline:
                for other in missing:
                    self.give_up(other, "it did not answer when the others agreed on who is left")
            if member in members and not self._suspects.keys().isdisjoint(missing):
                decision = self._set_once(key, None)
                return decision
            if self._stop.is_set():
                return None
            time.sleep(_PAUSE_S)
        decision = json.loads(self._store.get(key))
        return decision

    def _is_there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _set_once(self, key: str, value: Any) -> Any:
        """What is under ``key``: ``value``, unless another rank was the first."""
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def _adopt(self, epoch: Epoch) -> None:
        """Take over what has been decided."""
        self._epochs.append(epoch)
        member = self._mesh.member
        if member not in epoch.members:
            self._error = ExchangeError(
                f"rank {member}: the others went on without this rank from step {epoch.first_step} on: it was cut off, "
                "or had not answered for long; what it has is older than what they have, and is not mixed in"
            )
        elif len(epoch.members) < self._min_ranks:
            self._error = self._too_few(epoch.members)

    def _fail_as_too_few(self, members: Sequence[int]) -> None:
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not self._stop.is_set():
            if self._is_there(f"proposal/{self._num_attempts + 1}"):
                return
            time.sleep(_PAUSE_S)
        with self._changed:
            self._error = self._too_few(members)
            self._changed.notify_all()

    def _too_few(self, members: Sequence[int]) -> ExchangeError:
        gone = [other for other in self._initial if other not in members]
        reasons = "; ".join(f"rank {other}: {self._suspects.get(other, 'given up by others')}" for other in gone)
        return ExchangeError(
            f"rank {self._mesh.member}: {len(members)} of {len(self._initial)} ranks are left ({in_words(members)}), "
            f"fewer than min_ranks={self._min_ranks}; missing: {reasons}. Start again from the newest checkpoint, or "
            "go on with fewer by min_ranks=...",
            culprits=gone,
        )

    def _fail(self, text: str) -> None:
        with self._changed:
            self._error = ExchangeError(f"rank {self._mesh.member}: {text}")
            self._changed.notify_all()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End the thread. Local."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())

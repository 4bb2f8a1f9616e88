"""Waiting for other ranks, and finding out whose fault it is that it takes so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch.distributed as dist

from gossip.communication import daemon_threads
from gossip.communication.culprits import Arrival, Sighting, Verdict, find_culprits
from gossip.communication.roll_call import STORE_IS_SILENT, STORE_PATIENCE_S, RollCall
from gossip.communication.sockets import with_resending

#: A wait is long, and others are told of it, after a tenth of the time-out, or after this.
_PATIENCE_S = 1.0
#: Who waits says so again after a tenth of the time-out, or after this.
_BEAT_S = 0.5
_SHORTEST_BEAT_S = 0.02
_NUM_BEATS_MISSED = 3
_LEAST_GRACE_S = 0.3
_GLANCE = timedelta(seconds=0.02)


class Awaited(Protocol):
    """Something that ends some time."""

    @property
    def error(self) -> Exception | None:
        """Why it ended otherwise than it should."""

    def wait(self, timeout: timedelta) -> bool:
        """Whether it has ended, well or not, within ``timeout``."""


class Failure(NamedTuple):
    """A wait in vain.

    Attributes
    ----------
    verdict : Verdict
        Whose fault it is.
    waited_s : float
        How long it was, at most the time-out.
    """

    verdict: Verdict
    waited_s: float


def wait_for(
    awaited: Awaited,
    roll_call: RollCall,
    timeout: timedelta,
    *,
    where: str,
    ranks: Callable[[], Sequence[int]],
    sequence: int | None = None,
    look: Callable[[], None] | None = None,
) -> Failure | None:
    """Wait until ``awaited`` has ended well, or it is known whose fault it is that it does not. Ctrl-C gets through.

    A wait that takes long is told to the others in a note, which this rank renews for as long as it waits and lives;
    and it reads theirs. So all of them can follow the chain to the one that waits for nobody. A rank that has given up
    ends the waits for it at once. Who was not heard of gets a fifth more than ``timeout``, or a moment: an outage may
    have ended in time (``communication.sockets``), or that rank may just have begun to wait.

    Parameters
    ----------
    awaited : Awaited
    roll_call : RollCall
    timeout : timedelta
    where : str
        For the others.
    ranks : callable
        For whom it waits just now.
    sequence : int, optional
        Of the collective that it waits in; None: it waits in none.
    look : callable, optional
        Called from time to time in a long wait; what it raises ends it.
    """
    began = time.monotonic()
    timeout_s = timeout.total_seconds()
    patience_s, beat_s = min(_PATIENCE_S, timeout_s / 10), min(_BEAT_S, timeout_s / 10)
    if awaited.wait(timedelta(seconds=patience_s)) and awaited.error is None:
        return None
    grace_s = max(_LEAST_GRACE_S, patience_s + (_NUM_BEATS_MISSED - 1) * beat_s)
    end: float | None = None
    with Vigil(roll_call, where, ranks, beat_s) as vigil:
        while not awaited.wait(_GLANCE) or awaited.error is not None:
            error, now = awaited.error, time.monotonic()
            if error is not None and not is_lost_connection(error):
                verdict = Verdict((), str(error))
                break
            if error is not None:
                time.sleep(_GLANCE.total_seconds())
            elif look is not None:
                look()
            if end is None and error is not None:
                end = now + grace_s
            elif end is None and now - began >= timeout_s:
                end = max(began + with_resending(timeout).total_seconds(), now + grace_s)
            verdict = vigil.verdict(sequence)
            if verdict.ends_wait or (end is not None and (verdict.is_certain or now >= end)):
                break
        else:
            return None
    roll_call.note_giving_up(verdict.culprits, verdict.reason)
    return Failure(verdict, min(timeout_s, time.monotonic() - began))


def is_lost_connection(error: BaseException) -> bool:
    """Whether an operation's error is another rank's fault; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Vigil:
    """A long wait: renews this rank's note, and watches the others', in a thread of its own.

    A store whose host has been cut off can hold its caller for hours; and who is suspended renews nothing.
    """

    def __init__(self, roll_call: RollCall, where: str, ranks: Callable[[], Sequence[int]], beat_s: float) -> None:
        self._roll_call = roll_call
        self._where = where
        self._ranks = ranks
        self._beat_s = beat_s
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._answered_at = self._began
        self._failure = ""
        self._arrivals: list[Arrival | None] = [None] * roll_call.world_size
        self._states = [""] * roll_call.world_size
        self._changed_at: dict[int, float] = {}
        self._has_read = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Vigil:
        if self._roll_call.has_store:
            self._thread = daemon_threads.start("gossip-vigil", self._watch, end=self._stop.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STORE_PATIENCE_S)
            self._roll_call.is_silent = self._thread.is_alive()

    def verdict(self, sequence: int | None) -> Verdict:
        """By what is known now."""
        roll_call = self._roll_call
        if not roll_call.has_store:
            return Verdict((), "this backend has no key-value store to tell who is absent", is_certain=True)
        now = time.monotonic()
        is_silent = bool(self._failure) or now - self._answered_at > STORE_PATIENCE_S
        if not self._has_read and not is_silent:
            return Verdict((), "nothing is known of the others yet")
        # What a rank said before it ended has been read: it may have been somebody else's fault.
        states = self._live_states() if is_silent else self._states
        freshness_s = _NUM_BEATS_MISSED * self._beat_s + _LEAST_GRACE_S
        sightings = {
            rank: Sighting(
                self._arrivals[rank],
                is_fresh=now - self._changed_at.get(rank, -freshness_s) < freshness_s,
                state=states[rank],
                pid=roll_call.processes[rank].pid,
            )
            for rank in range(roll_call.world_size)
            if rank != roll_call.rank
        }
        verdict = find_culprits(
            roll_call.rank,
            self._where,
            self._ranks(),
            sightings,
            sequence=roll_call.sequence if sequence is None else sequence,
            is_collective=sequence is not None,
        )
        if verdict.is_certain or not is_silent:
            return verdict
        return Verdict((), f"{STORE_IS_SILENT}{self._failure}")

    def _live_states(self) -> list[str]:
        """Of the processes of those that this rank waits for, or that somebody waits for whom it waits for."""
        roll_call = self._roll_call
        asked = set(self._ranks()).union(*(arrival.waits_for for arrival in self._arrivals if arrival is not None))
        return [
            roll_call.state_of(rank) if rank in asked and rank != roll_call.rank else ""
            for rank in range(roll_call.world_size)
        ]

    def _watch(self) -> None:
        beat, pause_s = 0, min(_SHORTEST_BEAT_S, self._beat_s)
        try:
            while not self._stop.is_set():
                beat += 1
                self._roll_call.note_waiting(self._where, self._ranks(), beat)
                states = self._live_states()
                arrivals = self._roll_call.read()
                now = time.monotonic()
                for rank, (old, new) in enumerate(zip(self._arrivals, arrivals, strict=True)):
                    if self._has_read and old != new:
                        self._changed_at[rank] = now
                self._arrivals, self._states, self._answered_at, self._has_read = arrivals, states, now, True
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, self._beat_s)
        except RuntimeError as error:
            self._failure = f" ({str(error).splitlines()[0]})" if str(error) else " "

"""Waits for other ranks, and the search for the rank that causes a long wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch.distributed as dist

from gossip.communication.host import daemon_threads
from gossip.communication.host.tcp_options import with_resending
from gossip.communication.liveness.progress_markers import STORE_IS_SILENT, STORE_PATIENCE_S, ProgressMarkers
from gossip.communication.liveness.wait_for_graph import Arrival, Sighting, Verdict, find_blocking_ranks
from gossip.errors import GossipError

#: A wait is long, and reported to the others, after a tenth of the time-out, or after this.
_PATIENCE_S = 1.0
#: A waiting rank repeats its report after a tenth of the time-out, or after this.
_BEAT_S = 0.5
_SHORTEST_BEAT_S = 0.02
_NUM_BEATS_MISSED = 3
_LEAST_GRACE_S = 0.3
_GLANCE = timedelta(seconds=0.02)


class Awaited(Protocol):
    """Something that ends at some time."""

    @property
    def error(self) -> Exception | None:
        """Why it failed, or None."""

    def wait(self, timeout: timedelta) -> bool:
        """Return whether it has ended, successfully or not, within ``timeout``."""


class Ended(NamedTuple):
    """An operation that has already failed."""

    error: Exception

    @staticmethod
    def wait(_: timedelta) -> bool:
        """Return True, as it has ended."""
        return True


class Failure(NamedTuple):
    """The outcome of a wait that failed.

    Attributes
    ----------
    verdict : Verdict
        The ranks that caused it.
    timeout_s : float
        The time-out.
    has_timed_out : bool
        Whether the wait lasted that long; otherwise it was clear before that it would fail.
    """

    verdict: Verdict
    timeout_s: float
    has_timed_out: bool

    @property
    def of_waiting(self) -> str:
        """The beginning of a text: what became of waiting."""
        return f"timed out after {self.timeout_s:g} s waiting" if self.has_timed_out else "failed while waiting"


def wait_for(
    awaited: Awaited,
    progress_markers: ProgressMarkers,
    timeout: timedelta,
    *,
    where: str,
    ranks: Callable[[], Sequence[int]],
    sequence: int | None = None,
) -> Failure | None:
    """Wait until ``awaited`` has ended, or it is known which rank prevents this; None if it has ended successfully.

    A long wait is reported to the others in a note, which this rank renews for as long as it waits and lives, and this
    rank reads the notes of the others. So every rank can follow the chain to the rank that waits for nobody. When a
    rank has given up, the waits for it end at once. A rank that has not been heard from is allowed a fifth more than
    ``timeout``, or a moment: an outage may have ended in time (``host.tcp_options``), or that rank may only just
    have started to wait. Can be interrupted by Ctrl-C.

    Parameters
    ----------
    where : str
        Where this rank waits, for the other ranks.
    ranks : callable
        Returns the ranks that it currently waits for.
    sequence : int, optional
        The number of the collective in which it waits; None outside a collective.
    """
    began = time.monotonic()
    timeout_s = timeout.total_seconds()
    patience_s, beat_s = min(_PATIENCE_S, timeout_s / 10), min(_BEAT_S, timeout_s / 10)
    if awaited.wait(timedelta(seconds=patience_s)) and awaited.error is None:
        return None
    grace_s = max(_LEAST_GRACE_S, patience_s + (_NUM_BEATS_MISSED - 1) * beat_s)
    end: float | None = None
    with WaitMonitor(progress_markers, where, ranks, beat_s) as monitor:
        while not awaited.wait(_GLANCE) or awaited.error is not None:
            error, now = awaited.error, time.monotonic()
            if error is not None and not is_lost_connection(error):
                verdict = Verdict((), str(error))
                break
            if error is not None:
                time.sleep(_GLANCE.total_seconds())
            if end is None and error is not None:
                end = now + grace_s
            elif end is None and now - began >= timeout_s:
                end = max(began + with_resending(timeout).total_seconds(), now + grace_s)
            verdict = monitor.verdict(sequence)
            if verdict.ends_wait or (end is not None and (verdict.is_certain or now >= end)):
                break
        else:
            return None
    progress_markers.note_giving_up(verdict.failed_ranks, verdict.reason)
    return Failure(verdict, timeout_s, time.monotonic() - began >= timeout_s)


def checked_timeout(timeout: timedelta) -> timedelta:
    """Return the argument ``timeout``, if it is one."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}; write timedelta(seconds=...)")
    if not timeout > timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}")
    return timeout


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an operation failed because of another rank; gloo's errors have no specific type."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class WaitMonitor:
    """A long wait: renews this rank's note and watches the others', in a separate thread.

    The thread is needed because a store whose host is cut off can block its caller for hours; a suspended process
    renews nothing.
    """

    def __init__(self, markers: ProgressMarkers, where: str, ranks: Callable[[], Sequence[int]], beat_s: float) -> None:
        self._markers = markers
        self._where = where
        self._ranks = ranks
        self._beat_s = beat_s
        self._stop = threading.Event()
        self._answered_at = time.monotonic()
        self._failure = ""
        self._errors: list[Exception] = []
        self._arrivals: list[Arrival | None] = [None] * markers.world_size
        self._states = [""] * markers.world_size
        self._changed_at: dict[int, float] = {}
        self._has_read = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> WaitMonitor:
        if self._markers.has_store:
            self._thread = daemon_threads.start(
                "gossip-watch", self._watch, end=self._stop.set, failed=self._errors.append
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STORE_PATIENCE_S)
            self._markers.is_silent = self._thread.is_alive()

    def verdict(self, sequence: int | None) -> Verdict:
        """Return the verdict by what is known now; raise if the thread has failed, which is no fault of the others."""
        markers = self._markers
        if self._errors:
            raise GossipError(
                f"rank {markers.rank}: {self._where}: the thread that looks for the rank that causes a long wait has "
                f"failed: {self._errors[0]!r}"
            ) from self._errors[0]
        if not markers.has_store:
            return Verdict((), "this backend has no key-value store to tell who is absent", is_certain=True)
        now = time.monotonic()
        is_silent = bool(self._failure) or now - self._answered_at > STORE_PATIENCE_S
        if not self._has_read and not is_silent:
            return Verdict((), "nothing is known about the others yet")
        # What a rank reported before it ended has been read: another rank may have caused its end.
        states = self._live_states() if is_silent else self._states
        freshness_s = _NUM_BEATS_MISSED * self._beat_s + _LEAST_GRACE_S
        sightings = {
            rank: Sighting(
                self._arrivals[rank],
                is_fresh=now - self._changed_at.get(rank, -freshness_s) < freshness_s,
                state=states[rank],
                pid=markers.processes[rank].pid,
            )
            for rank in range(markers.world_size)
            if rank != markers.rank
        }
        verdict = find_blocking_ranks(
            markers.rank,
            self._where,
            self._ranks(),
            sightings,
            sequence=markers.sequence if sequence is None else sequence,
            is_collective=sequence is not None,
        )
        if verdict.is_certain or not is_silent:
            return verdict
        return Verdict((), f"{STORE_IS_SILENT}{self._failure}")

    def _live_states(self) -> list[str]:
        """Return the process states of ranks that this rank waits for, directly or through one other rank."""
        markers = self._markers
        asked = set(self._ranks()).union(*(arrival.waits_for for arrival in self._arrivals if arrival is not None))
        return [
            markers.state_of(rank) if rank in asked and rank != markers.rank else ""
            for rank in range(markers.world_size)
        ]

    def _watch(self) -> None:
        beat, pause_s = 0, min(_SHORTEST_BEAT_S, self._beat_s)
        try:
            while not self._stop.is_set():
                beat += 1
                self._markers.note_waiting(self._where, self._ranks(), beat)
                states = self._live_states()
                arrivals = self._markers.read()
                now = time.monotonic()
                for rank, (old, new) in enumerate(zip(self._arrivals, arrivals, strict=True)):
                    if self._has_read and old != new:
                        self._changed_at[rank] = now
                self._arrivals, self._states, self._answered_at, self._has_read = arrivals, states, now, True
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, self._beat_s)
        except RuntimeError as error:
            self._failure = f" ({str(error).splitlines()[0]})" if str(error) else " "

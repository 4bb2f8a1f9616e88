"""Who has arrived where: notes in the key-value store that name the rank which everybody waits for."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from gossip.communication import threads
from gossip.errors import ExchangeError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_Answer = TypeVar("_Answer")
_STORE_PATIENCE = timedelta(seconds=2)
_STORE_IS_GONE = (
    "the key-value store does not answer: the process that holds it is gone (rank 0 where the group was made by env:// "
    "or tcp://, otherwise the launcher)"
)


@dataclass(frozen=True)
class Arrival:
    """Where a rank was seen last: how many collectives it had called, and the name of the latest."""

    sequence: int
    what: str
    gave_up: bool = False


class RollCall:
    """Each rank's latest arrival at a collective, for all ranks to read.

    A note costs one message to the store, which nobody waits for; notes are read only when somebody has waited in vain.

    Parameters
    ----------
    store : Store or None
        Of keys that no other roll call uses. None (MPI has no store): notes go nowhere and nobody can be named.
    rank, world_size : int
    """

    def __init__(self, store: dist.Store | None, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"arrival{each}" for each in range(world_size)]
        self._sequence = -1
        self._what = ""

    def note(self, what: str) -> None:
        """Tell the others that this rank has arrived at its next collective. Local."""
        self._sequence += 1
        self._what = what
        self._write(gave_up=False)

    def note_giving_up(self) -> None:
        """Tell the others that this rank waits no longer. Local."""
        self._write(gave_up=True)

    def wait_for_all(self, timeout: timedelta) -> str | None:
        """None once all ranks have made their first note; else, after ``timeout``, in words who has not.

        Raises
        ------
        ExchangeError
            The store is gone.
        """
        if self._store is None:
            return None
        arrivals = self._ask(lambda stop: self._poll(stop, timeout), timeout + _STORE_PATIENCE)
        absent = [rank for rank, arrival in enumerate(arrivals) if arrival is None]
        if not absent:  # otherwise it is for their sake that somebody may have given up
            absent = [rank for rank, arrival in enumerate(arrivals) if arrival is not None and arrival.gave_up]
        return None if not absent else self._name(absent, arrivals)

    def explain(self, patience: timedelta = timedelta(0)) -> str:
        """In words who is absent from this rank's latest collective, once ``patience`` has passed. Local."""
        if self._store is None:
            return "this backend has no key-value store to tell who is absent"
        try:
            arrivals = self._ask(lambda stop: self._poll(stop, patience), patience + _STORE_PATIENCE)
        except ExchangeError as error:
            return str(error)
        absent = [rank for rank, arrival in enumerate(arrivals) if arrival is None or arrival.sequence < self._sequence]
        if absent:
            return self._name(absent, arrivals)
        others = [
            rank
            for rank, arrival in enumerate(arrivals)
            if arrival is not None and rank != self._rank and self._is_elsewhere(arrival)
        ]
        if others:
            return self._name_elsewhere(others, arrivals)
        return "all have arrived: one has died since, or the network is cut"

    def explain_ahead(self) -> str:
        """In words which ranks have gone on to a collective that this rank has not called; empty if none. Local."""
        if self._store is None:
            return ""
        try:
            arrivals = self._ask(lambda _: self._read(), _STORE_PATIENCE)
        except ExchangeError as error:
            return str(error)
        ahead = [rank for rank, arrival in enumerate(arrivals) if arrival and arrival.sequence > self._sequence]
        return self._name_elsewhere(ahead, arrivals) if ahead else ""

    def note_progress(self, step: int, bucket: int) -> None:
        """Tell the others which exchange this rank has announced. Local."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"progress{self._rank}", json.dumps([step, bucket]))

    def progress(self, rank: int) -> tuple[int, int] | None:
        """Step and bucket of the latest exchange that ``rank`` has announced; None if not known. Local."""
        store, key = self._store, f"progress{rank}"
        if store is None:
            return None
        try:
            found = self._ask(lambda _: json.loads(store.get(key)) if store.check([key]) else None, _STORE_PATIENCE)
        except ExchangeError:
            return None
        return None if found is None else (found[0], found[1])

    def close(self) -> None:
        """Give the connection to the store back."""
        self._store = None

    # ------------------------------------------------------------------ the store

    def _write(self, *, gave_up: bool) -> None:
        if self._store is None:
            return
        # What is in the way of a note need not be in the way of training; who waits in vain will be told.
        with contextlib.suppress(RuntimeError):
            self._store.set(self._keys[self._rank], json.dumps([self._sequence, self._what, gave_up]))

    def _poll(self, stop: threading.Event, timeout: timedelta) -> list[Arrival | None]:
        """All arrivals, once everybody has come as far as this rank, or ``timeout`` has passed."""
        assert self._store is not None
        deadline = time.monotonic() + timeout.total_seconds()
        pause_s = _FIRST_PAUSE_S
        while True:
            # Asking for all keys at once is one message; store.wait would hold the thread, and warns at each time-out.
            arrivals = self._read() if self._store.check(self._keys) else None
            if arrivals and all(each is not None and each.sequence >= self._sequence for each in arrivals):
                return arrivals
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or stop.wait(min(pause_s, remaining_s)):
                return arrivals or self._read()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self) -> list[Arrival | None]:
        store = self._store
        assert store is not None
        present = [store.check([key]) for key in self._keys]
        return [
            Arrival(*json.loads(store.get(key))) if there else None
            for key, there in zip(self._keys, present, strict=True)
        ]

    def _ask(self, question: Callable[[threading.Event], _Answer], patience: timedelta) -> _Answer:
        """The answer of another thread: a store whose host has been cut off can hold its caller for hours."""
        stop, answers, errors = threading.Event(), list[_Answer](), list[Exception]()

        def ask() -> None:
            try:
                answers.append(question(stop))
            except Exception as error:
                errors.append(error)

        thread = threads.start("gossip-roll-call", ask, end=stop.set)
        try:
            thread.join(patience.total_seconds())
        finally:
            stop.set()
        if answers:
            return answers[0]
        reason = f" ({str(errors[0]).splitlines()[0]})" if errors and str(errors[0]) else ""
        raise ExchangeError(f"{_STORE_IS_GONE}{reason}") from (errors[0] if errors else None)

    # ------------------------------------------------------------------ in words

    def _is_elsewhere(self, arrival: Arrival) -> bool:
        return arrival.gave_up or (arrival.sequence, arrival.what) != (self._sequence, self._what)

    def _name(self, absent: Sequence[int], arrivals: Sequence[Arrival | None]) -> str:
        return "; ".join([f"{_ranks(absent)} absent", *(_last_seen(rank, arrivals[rank]) for rank in absent)])

    @staticmethod
    def _name_elsewhere(ranks: Sequence[int], arrivals: Sequence[Arrival | None]) -> str:
        return "; ".join(_last_seen(rank, arrivals[rank], "is meanwhile in") for rank in ranks)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def _last_seen(rank: int, arrival: Arrival | None, verb: str = "was last seen in") -> str:
    if arrival is None:
        return f"rank {rank} was never seen"
    if arrival.gave_up:
        return f"rank {rank} has given up waiting in {arrival.what!r}"
    return f"rank {rank} {verb} {arrival.what!r}"

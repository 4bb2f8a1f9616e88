"""Notes in the key-value store of where ranks have arrived, which name the rank that all others wait for."""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gossip.communication import authenticated_store
from gossip.communication.host import daemon_threads
from gossip.communication.liveness import peer_liveness
from gossip.communication.liveness.process_liveness import GONE, Process, own_process, state_of
from gossip.communication.liveness.wait_for_graph import Arrival
from gossip.errors import ExchangeError

_NONCE_BYTES = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_Answer = TypeVar("_Answer")
STORE_PATIENCE_S = 2.0
_STORE_PATIENCE = timedelta(seconds=STORE_PATIENCE_S)
STORE_IS_SILENT = (
    "the key-value store does not reply: this rank is cut off from it, or the process that holds it is gone (rank 0 "
    "if the group was made by env:// or tcp://, otherwise the launcher)"
)


class ProgressMarkers:
    """The latest arrival of each rank at a collective, for all ranks to read.

    A note costs one message to the store, which nobody awaits; notes are read only when a rank has waited for long
    (:func:`gossip.communication.waiting.wait_for`).

    Parameters
    ----------
    store : Store or None
        A store with keys that no other markers use. With None (MPI has no store), notes go nowhere and no rank can
        be named.

    Attributes
    ----------
    processes : list of Process
        The processes by rank, once all ranks have been waited for.
    sequence : int
        The number of this rank's latest collective.
    has_store : bool
        Whether notes are stored anywhere.
    nonces : list of str
        A random number of each rank, once all have been waited for: together, they never occur again.
    is_silent : bool
        Whether the store was found to block its callers; nothing is written to it any more.
    """

    def __init__(self, store: dist.Store | None, rank: int, world_size: int) -> None:
        self._store = store
        self.has_store = store is not None
        self.rank = rank
        self.world_size = world_size
        self.is_silent = False
        self._have_met = False
        self._keys = [f"arrival{rank}" for rank in range(world_size)]
        self.sequence = -1
        self._what = ""
        self.processes = [Process("", 0, 0)] * world_size
        host, port = peer_liveness.listen(store)
        self.processes[rank] = own_process()._replace(host=host, port=port)
        self.nonces = [secrets.token_hex(_NONCE_BYTES)] * world_size
        self._set(f"process{rank}", [*self.processes[rank], self.nonces[rank]])

    def note(self, what: str) -> None:
        """Tell the others that this rank has arrived at its next collective. Local."""
        self.sequence += 1
        self._what = what
        self._write(Arrival(self.sequence, what))

    def note_waiting(self, where: str, ranks: Sequence[int], beat: int) -> None:
        """Tell the others for which ranks this rank has been waiting for long. Local."""
        self._write(Arrival(self.sequence, self._what, waits_in=where, waits_for=list(ranks), beat=beat))

    def note_giving_up(self, blames: Sequence[int] = (), reason: str = "") -> None:
        """Tell the others that this rank has stopped waiting, and why. Local."""
        self._write(Arrival(self.sequence, self._what, gave_up=True, blames=list(blames), reason=reason))

    def wait_for_all(self, timeout: timedelta) -> str | None:
        """Return None once all ranks have made their first note; after ``timeout``, in words which have not."""
        if self._store is None:
            return None
        absent, arrivals = self._ask(lambda stop: self._meet(stop, timeout), timeout + _STORE_PATIENCE)
        if not absent:  # otherwise a rank may have given up because of the absent ones
            absent = [rank for rank, arrival in enumerate(arrivals) if arrival is not None and arrival.gave_up]
        if not absent:
            return None
        who = f"rank {absent[0]} is"
        if len(absent) > 1:
            who = f"ranks {', '.join(map(str, absent[:-1]))} and {absent[-1]} are"
        return "; ".join([f"{who} absent", *(_last_seen(rank, arrivals[rank]) for rank in absent)])

    def read(self) -> list[Arrival | None]:
        """Return the newest note of every rank. May take as long as the store likes."""
        store: Any = self._store
        if store is None:
            return [None] * self.world_size
        if self._have_met:
            return [Arrival(**json.loads(note)) for note in self._get(self._keys)]
        return [Arrival(**json.loads(store.get(key))) if store.check([key]) else None for key in self._keys]

    def note_exchange(self, where: str) -> None:
        """Tell the others which exchange this rank has announced. Local."""
        self._set(f"exchange{self.rank}", where)

    def last_seen(self, ranks: Sequence[int]) -> str:
        """Return in words which exchanges these ranks have announced last. Local."""
        store: Any = self._store
        keys = {rank: f"exchange{rank}" for rank in ranks if store is not None}

        def read(_: threading.Event) -> dict[int, str]:
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

        try:
            found = self._ask(read, _STORE_PATIENCE)
        except ExchangeError as error:
            return str(error)
        return "; ".join(f"rank {rank} was last seen in {found.get(rank, 'none')}" for rank in ranks)

    def state_of(self, rank: int) -> str:
        """Return ``GONE``, ``SUSPENDED`` or, if the process is alive or its state is unknown, "". Local.

        ``SUSPENDED`` is only detected on one machine.
        """
        process = self.processes[rank]
        state = state_of(process, self.processes[self.rank])
        return GONE if not state and peer_liveness.is_gone(process) else state

    def close(self) -> None:
        """Release the connection to the store. Local."""
        self._store, self.has_store = None, False

    # ------------------------------------------------------------------ the store

    def _write(self, arrival: Arrival) -> None:
        self._set(self._keys[self.rank], arrival._asdict())

    def _set(self, key: str, content: object) -> None:
        if self._store is None or self.is_silent:
            return
        # What prevents a note need not prevent training; a rank that waits too long is told.
        with contextlib.suppress(RuntimeError):
            self._store.set(key, json.dumps(content))

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of the keys, in a single message if the store can do that."""
        store: Any = self._store
        found: list[bytes] = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return found

    def _meet(self, stop: threading.Event, timeout: timedelta) -> tuple[list[int], list[Arrival | None]]:
        """Wait until all ranks are here, one has ended, or ``timeout`` has passed; return absent ranks and all notes.

        With several machines no rank continues before all have connected to all: from then on every end of a process is
        detected.
        """
        store = self._store
        assert store is not None
        deadline = time.monotonic() + timeout.total_seconds()
        absent = self._absent(self._keys, deadline, stop)
        if not absent:
            notes = self._get([f"process{rank}" for rank in range(self.world_size)])
            found = [authenticated_store.read(note) for note in notes]
            self.processes = [Process(*process) for *process, _ in found]
            self.nonces = [nonce for *_, nonce in found]
            if any(process.host for process in self.processes):
                peer_liveness.connect(self.processes)
                self._set(f"connected{self.rank}", True)
                absent = self._absent([f"connected{rank}" for rank in range(self.world_size)], deadline, stop)
        self._have_met = not absent
        return absent, self.read()

    def _absent(self, keys: Sequence[str], deadline: float, stop: threading.Event) -> list[int]:
        """Return the ranks whose keys are not in the store by then, or as soon as one of the ranks has ended."""
        store = self._store
        assert store is not None
        pause_s = _FIRST_PAUSE_S
        # Asking for all keys at once is a single message; store.wait would block the thread, and warns at each
        # time-out.
        while not store.check(list(keys)):
            remaining_s = deadline - time.monotonic()
            gone = any(self.state_of(rank) == GONE for rank in range(self.world_size) if rank != self.rank)
            if gone or remaining_s <= 0 or stop.wait(min(pause_s, remaining_s)):
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return []

    def _ask(self, question: Callable[[threading.Event], _Answer], patience: timedelta) -> _Answer:
        """Return the reply that another thread gets: a store whose host is cut off can block its caller for hours."""
        stop, answers, errors = threading.Event(), list[_Answer](), list[Exception]()

        def ask() -> None:
            answers.append(question(stop))

        thread = daemon_threads.start("gossip-progress-markers", ask, end=stop.set, failed=errors.append)
        try:
            thread.join(patience.total_seconds())
        finally:
            stop.set()
        if answers:
            return answers[0]
        # Stores have no specific type of errors.
        if errors and (
            isinstance(errors[0], authenticated_store.NotGenuine) or not isinstance(errors[0], RuntimeError)
        ):
            raise errors[0]
        reason = f" ({str(errors[0]).splitlines()[0]})" if errors and str(errors[0]) else ""
        raise ExchangeError(f"{STORE_IS_SILENT}{reason}") from (errors[0] if errors else None)


def _last_seen(rank: int, arrival: Arrival | None) -> str:
    if arrival is None:
        return f"rank {rank} was never seen"
    if arrival.gave_up:
        return f"rank {rank} has given up waiting in {arrival.what!r}"
    return f"rank {rank} was last seen in {arrival.what!r}"

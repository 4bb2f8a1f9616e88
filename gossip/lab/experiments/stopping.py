"""SIGTERM and USR1 while a run trains: all ranks stop after the same step, so that they can save what they have.

Where nothing is saved, and after Ctrl-C, the run ends at once, and a call that no signal interrupts does not hold it
for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

import torch.distributed as dist

from gossip import ExchangeError, World
from gossip.communication import daemon_threads
from gossip.launching import signal_workers

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to save and end: SLURM sends the first at a preemption, and the second where it is asked to."""

GRACE_S = 20.0
"""How long the ranks may take from the signal to the step after which they save; a long step may be in the way."""

_PAUSE_S = 0.25  # between two looks for another rank's signal
_SHORT_PAUSE_S = 0.01
_ASKED = "asked"


class Stopping:
    """Whether the ranks stop, and after which step: once any of them gets a signal, all stop after the same one.

    A rank can be some steps ahead of another, and a rank-local decision would leave peers waiting. So each rank, once
    it knows of the signal, tells the others how many steps it is bound to have made (those that it has begun), and
    begins no other before everybody has told. The largest of these numbers is where all stop: no rank is past it, and
    those that are behind go on, so that those ahead get the messages that they wait for.

    A thread of its own listens to the signal and talks to the key-value store: the step that the main thread is in may
    be waiting for a rank that waits here already. If the ranks do not get there within ``grace_s``, the thread says so
    and ends the process, with the signal's status and without a checkpoint. So it does after Ctrl-C, or any signal
    where nothing is to be saved, if the handler that the program has for it has not ended the block by then: no handler
    runs before a call into C++ returns.

    Parameters
    ----------
    store : Store or None
        Of keys that are for this alone, the same on all ranks; None if there is one rank only.
    rank : int
    ranks : callable
        All of them; those who are lost meanwhile are asked for nothing.
    bound_steps : int
        How many steps this rank makes in any case: it must make the first one of this run.
    saves : bool
        Whether there is anything to agree on; False leaves all signals to the program's own handlers.
    last_words : callable
        Gets the reason if the thread ends the process, and returns what is to be said at the very end.
    grace_s : float

    Attributes
    ----------
    signal_number : int or None
        What the ranks were asked to stop by; None until :meth:`goes_on` says that they do.

    Notes
    -----
    Within ``with``, in the main thread; on the same ranks, which call :meth:`goes_on` after each step.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        ranks: Callable[[], Iterable[int]],
        bound_steps: int,
        *,
        saves: bool = True,
        last_words: Callable[[str], str] = lambda _: "",
        grace_s: float = GRACE_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._bound_steps = bound_steps
        self._saves = saves
        self._last_words = last_words
        self._grace_s = grace_s
        self.signal_number: int | None = None
        self._last_step: int | None = None
        self._lock = threading.Lock()
        self._is_asked = False
        self._is_agreed, self._is_there = threading.Event(), threading.Event()
        self._reading, self._writing = os.pipe()

    @classmethod
    def of_all_ranks(cls, world: World, bound_steps: int, *, saves: bool, last_words: Callable[[str], str]) -> Self:
        """For the ranks of a model, or for a process alone. Collective."""
        store = world.keys("stopping") if saves else None
        return cls(store, world.member, lambda: world.members, bound_steps, saves=saves, last_words=last_words)

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        self._wake_before: int | None = None
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._writing, False)
            self._wake_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            # The thread hears of the signal by the descriptor, also while the main thread is in foreign code.
            self._before = {number: signal.signal(number, _leave_to_the_thread) for number in SIGNALS if self._saves}
        self._thread = daemon_threads.start("gossip-stopping", self._watch, end=self._is_there.set)
        return self

    def __exit__(self, *_: object) -> None:
        if self._wake_before is not None:
            signal.set_wakeup_fd(self._wake_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._is_there.set()
        os.write(self._writing, b"\0")
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self._writing)

    def goes_on(self, step: int) -> bool:
        """Whether this rank makes another step after ``step`` of them. If not, no rank does.

        Raises
        ------
        ExchangeError
            The ranks did not agree.
        """
        with self._lock:
            if not self._is_asked:
                self._bound_steps = step + 1
                return True
        if not self._is_agreed.wait(2 * self._grace_s):
            raise ExchangeError(f"rank {self._rank}: the ranks could not agree on the step after which they stop")
        assert self._last_step is not None
        if step < self._last_step:
            return True
        self._is_there.set()
        return False

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        try:
            signal_number = self._listen()
            if signal_number is not None and self._saves and signal_number in SIGNALS:
                self._agree(signal_number)
            elif signal_number is not None and not self._is_there.wait(self._grace_s):
                self.signal_number = signal_number
                self._give_up("the call that the main thread is in has not returned")
        except RuntimeError as error:  # of the store
            if not self._is_there.is_set() and self._is_asked:
                self._give_up(f"the key-value store does not answer ({str(error).splitlines()[0]})")

    def _listen(self) -> int | None:
        """The signal, once this or another rank has got one; None once the training has ended."""
        while not self._is_there.is_set():
            ready, _, _ = select.select([self._reading], [], [], _PAUSE_S)
            for number in os.read(self._reading, 64) if ready else b"":
                if number in (*SIGNALS, signal.SIGINT):
                    return number
            with contextlib.suppress(RuntimeError):  # whoever misses the store will say so
                if self._saves and self._store is not None and self._store.check([_ASKED]):
                    return int(self._store.get(_ASKED))
        return None

    def _agree(self, signal_number: int) -> None:
        deadline = time.monotonic() + self._grace_s
        self.signal_number = signal_number
        with self._lock:
            self._is_asked = True  # from here on the main thread leaves the number as it is
        steps = [self._bound_steps]
        if self._store is not None:
            self._store.set(_ASKED, str(signal_number))
            self._store.set(f"steps{self._rank}", str(self._bound_steps))
            known: set[int] = set()
            while absent := [rank for rank in self._ranks() if not self._store.check([f"steps{rank}"])]:
                known |= set(absent)
                if self._is_there.wait(_SHORT_PAUSE_S):
                    return
                if time.monotonic() > deadline:
                    self._give_up(f"no answer from {'rank' if len(absent) == 1 else 'ranks'} {str(absent)[1:-1]}")
            # Whoever told and was lost counts too: others may have read it before.
            told = [f"steps{rank}" for rank in known.union(self._ranks()) if self._store.check([f"steps{rank}"])]
            steps = [int(self._store.get(key)) for key in told]
        self._last_step = max(steps)
        self._is_agreed.set()
        if not self._is_there.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"step {self._last_step}, after which all stop, has not ended")

    def _give_up(self, why: str) -> None:
        assert self.signal_number is not None
        name = signal.Signals(self.signal_number).name
        why = f"{self._grace_s:g} s after {name}: {why}; nothing is saved"
        print(f"rank {self._rank}: {why}\n{self._last_words(why)}", end="", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + self.signal_number)  # the main thread may be in a wait that no signal ends


@contextlib.contextmanager
def signals_for_workers() -> Iterator[list[int]]:
    """Within the block the workers of :func:`gossip.launch` get :data:`SIGNALS` in this process's place.

    Yields a list of those that came. Before there are workers a signal ends this process as it would without the block.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def forward(signal_number: int, frame: FrameType | None) -> None:
        if signal_workers(signal_number):
            came.append(signal_number)
        elif callable(handler := before[signal_number]):
            handler(signal_number, frame)
        else:
            raise SystemExit(128 + signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_to_the_thread(_: int, __: FrameType | None) -> None:
    """A handler there must be, or Python writes nothing to the descriptor."""

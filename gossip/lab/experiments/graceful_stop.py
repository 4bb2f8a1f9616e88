"""Graceful stop on SIGTERM and SIGUSR1: all ranks stop after the same step, so that they can save a checkpoint.

Without checkpoints, and after Ctrl-C, the run ends at once; a call that no signal can interrupt delays this only for a
bounded time.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from typing import Self

import torch.distributed as dist

from gossip import ExchangeError, GossipError
from gossip.communication.host import daemon_threads

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to save and exit. SLURM sends SIGTERM on preemption, and SIGUSR1 where configured to."""

GRACE_S = 20.0
"""The time that the ranks may take from the signal to the end of the step after which they save; steps may be long."""

_PAUSE_S = 0.25  # between two looks for another rank's signal
_SHORT_PAUSE_S = 0.01
_ASKED = "asked"


@dataclass(eq=False)
class GracefulStop:
    """Consensus of the ranks on a common last step, once any of them receives a signal.

    A rank can be some steps ahead of another, and a rank-local decision would leave peers waiting. So each rank that
    learns of the signal publishes the number of steps that it is committed to (those that it has begun), and begins no
    further step before all ranks have published theirs. All ranks stop after the largest of these numbers: no rank is
    past it, and ranks that are behind continue, so that those ahead receive the messages that they wait for.

    A separate thread listens for the signal and accesses the key-value store, because the step that the main thread is
    in may be waiting for a rank that waits here already. If the ranks do not reach the last step within ``GRACE_S``,
    the thread reports this and terminates the process with the signal's exit status and without a checkpoint. It does
    the same after Ctrl-C, or after any signal where nothing is to be saved, if the program's own handler has not ended
    the block by then: no handler runs before a call into C++ returns.

    Parameters
    ----------
    store : Store or None
        A key-value store with a key prefix that is reserved for this purpose, the same on all ranks; None for a single
        rank.
    rank, ranks
        The rank of this process, and a function that returns the present ranks: lost ones are not waited for.
    bound_steps : int
        The number of steps that this rank is committed to from the start: it must make the first step of this run.
    signals : tuple of int
        Those to which the ranks react together.
    saves : bool
        Whether there is anything to save; False leaves all signals to the program's own handlers.
    last_words : callable
        Takes the reason when the thread terminates the process, and returns the text to print last.

    A context manager for the main thread of every rank, which calls :meth:`goes_on` after each step. Once that has
    returned False, ``signal_number`` is that of the signal, which is None until then.
    """

    store: dist.Store | None
    rank: int
    ranks: Callable[[], Iterable[int]]
    bound_steps: int
    _: KW_ONLY
    signals: tuple[int, ...] = SIGNALS
    saves: bool = True
    last_words: Callable[[str], str] = lambda _: ""

    def __post_init__(self) -> None:
        self.signal_number: int | None = None
        self._lock = threading.Lock()
        self._is_asked = False
        self._last_step: Future[int] = Future()
        self._is_there = threading.Event()
        self._at_end = contextlib.ExitStack()
        self._reading, self._writing = os.pipe()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._writing, False)
            # The descriptor informs the thread of the signal even while the main thread executes native code.
            before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._at_end.callback(signal.set_wakeup_fd, before)
            if self.saves:  # without a handler in Python, nothing would be written to it
                for number in self.signals:
                    self._at_end.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        self._thread = daemon_threads.start(
            "gossip-stopping", self._watch, end=self._is_there.set, failed=self._last_step.set_exception
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end.close()
        self._is_there.set()
        os.write(self._writing, b"\0")
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self._writing)

    def goes_on(self, step: int) -> bool:
        """Whether this rank makes another step after ``step`` completed steps. If not, no rank does.

        An ExchangeError says that the ranks did not agree, another GossipError that the thread has failed.
        """
        with self._lock:
            if not self._is_asked and not self._last_step.done():
                self.bound_steps = step + 1
                return True
        try:
            is_last = step >= self._last_step.result(2 * GRACE_S)
        except TimeoutError:
            why = f"rank {self.rank}: the ranks could not agree on the step after which they stop"
            raise ExchangeError(why) from None
        except Exception as error:
            why = f"rank {self.rank}: the thread that listens for signals has failed: {error!r}"
            raise GossipError(why) from error
        if is_last:
            self._is_there.set()
        return not is_last

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        try:
            self.signal_number = self._listen()
            if self.signal_number in self.signals and self.saves:
                self._agree()
            elif self.signal_number is not None and not self._is_there.wait(GRACE_S):
                self._give_up("the call that the main thread is in has not returned")
        except RuntimeError as error:  # raised by the key-value store
            if not self._is_there.is_set() and self._is_asked:
                self._give_up(f"the key-value store does not answer ({str(error).splitlines()[0]})")

    def _listen(self) -> int | None:
        """Wait for a signal on this or another rank and return its number; None once the training has ended."""
        while not self._is_there.is_set():
            ready, _, _ = select.select([self._reading], [], [], _PAUSE_S)
            for number in os.read(self._reading, 64) if ready else b"":
                if number in (*self.signals, signal.SIGINT):
                    return number
            with contextlib.suppress(RuntimeError):  # a store that is gone is reported where it is needed
                if self.saves and self.store is not None and self.store.check([_ASKED]):
                    return int(self.store.get(_ASKED))
        return None

    def _agree(self) -> None:
        deadline = time.monotonic() + GRACE_S
        with self._lock:
            self._is_asked = True  # from here on the main thread no longer changes the number of bound steps
        steps = [self.bound_steps]
        if self.store is not None:
            self.store.set(_ASKED, str(self.signal_number))
            self.store.set(f"steps{self.rank}", str(self.bound_steps))
            known: set[int] = set()
            while absent := [rank for rank in self.ranks() if not self.store.check([f"steps{rank}"])]:
                known |= set(absent)
                if self._is_there.wait(_SHORT_PAUSE_S):
                    return
                if time.monotonic() > deadline:
                    self._give_up(f"no answer from {'rank' if len(absent) == 1 else 'ranks'} {str(absent)[1:-1]}")
            # A rank that published its number and was then lost counts too: others may have read the number already.
            told = [f"steps{rank}" for rank in known.union(self.ranks()) if self.store.check([f"steps{rank}"])]
            steps = [int(self.store.get(key)) for key in told]
        self._last_step.set_result(last_step := max(steps))
        if not self._is_there.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"step {last_step}, after which all stop, has not ended")

    def _give_up(self, why: str) -> None:
        assert self.signal_number is not None
        name = signal.Signals(self.signal_number).name
        why = f"{GRACE_S:g} s after {name}: {why}; nothing is saved"
        print(f"rank {self.rank}: {why}\n{self.last_words(why)}", end="", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(128 + self.signal_number)  # the main thread may be in a wait that no signal can interrupt

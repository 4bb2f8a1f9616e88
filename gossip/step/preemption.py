"""SIGTERM, which schedulers send before they reclaim a machine: this rank leaves the others before it exits."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.errors import reason
from gossip.step.engine import StepEngine

#: A process whose next forward pass does not start within this time exits without having left.
PATIENCE = timedelta(seconds=30)
EXIT_STATUS = 128 + signal.SIGTERM


class Preemption:
    """Leaves before the next forward pass after a SIGTERM, and exits with status 143.

    It is installed in the main thread only, and only if SIGTERM has no other handler.
    """

    def __init__(self, engine: StepEngine, leave: Callable[[], None]) -> None:
        self._engine = weakref.ref(engine)
        self._leave = leave
        self._has_left = threading.Event()
        self._is_due = False

    def install(self) -> None:
        """Handle SIGTERM from now on until the model is closed. Local."""
        is_main = threading.current_thread() is threading.main_thread()
        engine = self._engine()
        if engine is None or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        engine.on_forward, engine.on_close = self._leave_if_due, self._remove
        signal.signal(signal.SIGTERM, self._on_signal)

    def _remove(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        # Unless another handler has been installed since.
        if is_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        engine = self._engine()
        if engine is None or engine.error is not None or engine.is_parents:  # there are no other ranks to leave
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self._is_due:
            self._is_due = True
            daemon_threads.start(
                "gossip-preemption", self._end_in_time, end=self._has_left.set, failed=lambda _: os._exit(EXIT_STATUS)
            )

    def _leave_if_due(self) -> None:
        engine = self._engine()
        if not self._is_due or engine is None or engine.is_averaged:
            return
        logger.warning("rank {}: SIGTERM: leaving at step {}", engine.rank, engine.step)
        try:
            self._leave()
        except Exception as error:
            logger.error("rank {}: exiting without having left: {}", engine.rank, reason(error))
        self._has_left.set()
        raise SystemExit(EXIT_STATUS)

    def _end_in_time(self) -> None:
        if not self._has_left.wait(PATIENCE.total_seconds()):
            os._exit(EXIT_STATUS)

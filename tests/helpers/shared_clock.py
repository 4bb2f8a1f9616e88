"""A clock that several processes share, which stands still while one of them is kept from running.

On a busy machine a rank may not run for a second. By the clock of the wall the others would lose it then, and what a
test sees would depend on the machine. By this one no time has passed: it is the number of times that every process has
been given a chance to run, those apart that have ended or are suspended, for these are what a time-out is to find.
"""

import mmap
import os
import threading
import time
from pathlib import Path

THAW = """
import os, signal, sys
sys.path.insert(0, {helpers!r})
frozen = os.pidfd_open(int(sys.argv[2]))  # which may have ended by then, and another one have its number
from shared_clock import SharedClock
SharedClock({file!r}).sleep(float(sys.argv[1]))
signal.pidfd_send_signal(frozen, signal.SIGCONT)
"""
"""A program that resumes a process when so many seconds have passed by the clock in a file."""
_NUM_PROCESSES = 64
_TICK_S = 0.01
_AHEAD = 5
"""So many ticks a process may be ahead of the slowest, so that they need not wait for each other at every tick."""
_sleep = time.sleep


class SharedClock:
    """The clock of the processes that have opened the same file, in the process that has ``place`` in it.

    It begins with what ``time.monotonic()`` was when the file was made.
    """

    def __init__(self, file: str, place: int = 0) -> None:
        with open(file, "r+b") as opened:
            words = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
        self._began_ns, self._ticks = words[:1], words[-_NUM_PROCESSES:]
        self._process_ids = words[1 : _NUM_PROCESSES + 1]
        self._place = place

    @staticmethod
    def make(file: str) -> None:
        """Make the file."""
        words = [time.monotonic_ns(), *[0] * 2 * _NUM_PROCESSES]
        Path(file).write_bytes(b"".join(word.to_bytes(8, "little") for word in words))

    def replace_monotonic(self) -> None:
        """Let ``time.monotonic()`` read this clock for the rest of this process."""
        self._tick()
        self._process_ids[self._place] = os.getpid()
        threading.Thread(target=self._run, name="shared-clock", daemon=True).start()
        time.monotonic = self.monotonic

    def monotonic(self) -> float:
        return self._began_ns[0] / 1e9 + self._ticks[self._place] * _TICK_S

    def sleep(self, duration_s: float) -> None:
        """Sleep by this clock in a process that has no place of its own, until the others are that much later."""
        end = max(self._ticks) + duration_s / _TICK_S
        while max(self._ticks) < end:
            _sleep(_TICK_S)

    def _run(self) -> None:
        while True:
            _sleep(_TICK_S)
            self._tick()

    def _tick(self) -> None:
        furthest, own = max(self._ticks), self._ticks[self._place]
        if own < furthest - _AHEAD:  # it has just begun, or was suspended
            self._ticks[self._place] = furthest - _AHEAD
        elif not any(self._holds_back(place, own - _AHEAD) for place in range(_NUM_PROCESSES)):
            self._ticks[self._place] = own + 1

    def _holds_back(self, place: int, latest: int) -> bool:
        process_id = self._process_ids[place]
        return process_id > 0 and self._ticks[place] <= latest and _runs(process_id)


def _runs(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZXTt"

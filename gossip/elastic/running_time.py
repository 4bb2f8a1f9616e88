"""How long this process has waited for another one, which may have waited for this one."""

import time


class RunningTime:
    """The time that passes while this process runs.

    A process that stood still, because it was stopped or its host was suspended, must not conclude from the time that
    others have been silent: it has not looked. An interval between two looks counts at most ``most_s``.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._looked_at = time.monotonic()
        self._seconds = 0.0

    def passed(self) -> float:
        """Look at the clock, and return the seconds that have passed so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._seconds

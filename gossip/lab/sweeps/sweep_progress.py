"""Progress messages of a sweep, for any launcher: the number of runs that have ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.lab.experiments.run_folder import SUMMARY_FILE


@contextlib.contextmanager
def told(
    names: Sequence[str], folder: Path, *, pause_s: float = 10.0, say: Callable[[str], object] = logger.info
) -> Iterator[None]:
    """Report every ``pause_s``, within the block, how many of these runs have ended, and the time left at that pace.

    A run has ended once its folder, ``folder / name``, holds a summary.
    """
    began_at = time.monotonic()
    is_over = threading.Event()

    def look() -> None:
        num_said = 0
        while not is_over.wait(pause_s):
            num_ended = sum((folder / name / SUMMARY_FILE).exists() for name in names)
            if num_said < num_ended < len(names):
                left_min = (time.monotonic() - began_at) / num_ended * (len(names) - num_ended) / 60
                say(f"{num_ended} of {len(names)} runs have ended, about {left_min:.3g} min left")
                num_said = num_ended

    def failed(error: Exception) -> None:
        logger.warning("no more progress messages; the runs are not affected: {!r}", error)

    thread = daemon_threads.start("gossip-sweep-progress", look, end=is_over.set, failed=failed)
    try:
        yield
    finally:
        is_over.set()
        thread.join()

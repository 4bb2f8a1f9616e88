"""Progress messages of a sweep, for any launcher: the number of runs that have ended, and SLURM's job array."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.lab.experiments.run_folder import SUMMARY_FILE

PAUSE_S = 10.0
LOGS = ".submitit"
"""The sub-folder of a sweep in which hydra's launcher stores the output of each job, by SLURM job id."""


@contextlib.contextmanager
def told(
    names: Sequence[str], folder: Path, *, pause_s: float = PAUSE_S, say: Callable[[str], object] = logger.info
) -> Iterator[None]:
    """Report every ``pause_s``, within the block, how many of these runs have ended, and each new job array once.

    A run has ended once its folder, ``folder / name``, holds a summary. ``say`` is called with each message.
    """
    began_at = time.monotonic()
    is_over = threading.Event()
    earlier = _job_arrays(folder)

    def look() -> None:
        num_said = 0
        named = set(earlier)
        while True:
            is_last = is_over.wait(pause_s)
            for array in sorted(_job_arrays(folder) - named):
                say(f"SLURM job array {array}: squeue --job {array} lists its tasks, {folder / LOGS} has their output")
                named.add(array)
            if is_last:
                return
            num_ended = sum((folder / name / SUMMARY_FILE).exists() for name in names)
            if num_said < num_ended < len(names):
                say(line(num_ended, len(names), time.monotonic() - began_at))
                num_said = num_ended

    def failed(error: Exception) -> None:
        logger.warning("no more progress messages; the runs are not affected: {!r}", error)

    thread = daemon_threads.start("gossip-sweep-progress", look, end=is_over.set, failed=failed)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _job_arrays(folder: Path) -> set[str]:
    """Return the ids of the job arrays whose tasks have folders such as 123_4."""
    found = (folder / LOGS).glob("*_*") if (folder / LOGS).is_dir() else ()
    return {path.name.partition("_")[0] for path in found if path.name.replace("_", "").isdigit()}


def line(num_ended: int, num_runs: int, elapsed_s: float) -> str:
    """Return a message such as "3 of 12 runs have ended, about 6 min left", extrapolated from the pace so far."""
    left_s = elapsed_s / num_ended * (num_runs - num_ended)
    left = f"{left_s:.0f} s" if left_s < 60 else f"{left_s / 60:.0f} min" if left_s < 3600 else f"{left_s / 3600:.1f} h"
    return f"{num_ended} of {num_runs} runs have ended, about {left} left"

"""The fork server of the workers, started early: it imports while the launching process checks the configuration."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing import forkserver, resource_tracker

PRELOAD = (
    "gossip.experiments.training",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes seconds
    "hydra.utils",
    "safetensors.torch",
    "sklearn.datasets",
    "sklearn.model_selection",
)
"""What workers need; a module that is not installed is passed over."""


def start() -> None:
    """Start it if it does not run; the workers of every run of this process come from it.

    Ctrl-C is not for it: a traceback of its imports would be all that it had to say.
    """
    forkserver.set_forkserver_preload(list(PRELOAD))
    resource_tracker.ensure_running()  # the server would start it, and that unblocks SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stop() -> None:
    """End it at once, when no worker is left; by itself it ends after its launcher, but not amid its imports."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

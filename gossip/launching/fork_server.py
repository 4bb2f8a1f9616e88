"""The process from which workers are forked, with the modules that they need already imported."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

from gossip.private_torch import COMPILER


def start(preload: Sequence[str]) -> None:
    """Start the fork server if it is not running; all workers that this process launches are forked from it.

    It may be started early, to import modules while the caller does something else. It blocks SIGINT, because an
    interrupt would only make it print a traceback of its imports, and SIGUSR1, with which SLURM asks all processes of a
    run to save and exit.

    Parameters
    ----------
    preload : sequence of str
        Modules to import; one that is not installed is skipped. Only the argument of the first call has an effect.
    """
    # torch.optim imports torch._dynamo when the first optimizer is built, which takes seconds on every rank.
    forkserver.set_forkserver_preload([COMPILER, *preload])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        resource_tracker.ensure_running()  # the server would start it, and that unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stop() -> None:
    """Kill the fork server when no worker is left; by itself it exits after its launcher, but not while importing."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

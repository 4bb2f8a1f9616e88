"""The process from which workers are forked: it has imported already what they need."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

from gossip.private_torch import COMPILER


def start(preload: Sequence[str]) -> None:
    """Start it if it does not run; all workers that this process ever launches come from it.

    It may be started early, to import while the caller does something else. Ctrl-C is not for it: a traceback of its
    imports would be all that it had to say. Nor is USR1, with which SLURM asks all processes of a run to save and end.

    Parameters
    ----------
    preload : sequence of str
        Modules to import; one that is not installed is passed over. Only the first call's count.
    """
    # torch.optim imports torch._dynamo when the first optimizer is built: seconds, on every rank.
    forkserver.set_forkserver_preload([COMPILER, *preload])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        resource_tracker.ensure_running()  # the server would start it, and that unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stop() -> None:
    """End it at once, when no worker is left; by itself it ends after its launcher, but not amid its imports."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

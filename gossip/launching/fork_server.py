"""The process from which workers are forked, with the modules that they need already imported."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, process, resource_tracker, util

from gossip.errors import LaunchError
from gossip.private_torch import COMPILER

_MAX_FOLDER_LENGTH = 107 - len("/listener-12345678")  # the path of a socket has at most 107 bytes
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def start(preload: Sequence[str]) -> None:
    """Start the fork server if it is not running; all workers that this process launches are forked from it.

    It may be started early, to import modules while the caller does something else. It blocks SIGINT, because an
    interrupt would only make it print a traceback of its imports, and SIGUSR1, with which SLURM asks all processes of a
    run to save and exit. It imports the modules ``preload``, of the first call; one that is not installed is skipped.
    """
    _keep_sockets_reachable()
    # torch.optim imports torch._dynamo when the first optimizer is built, which takes seconds on every rank.
    forkserver.set_forkserver_preload([COMPILER, *preload, "gossip.launching.frozen_imports"])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        resource_tracker.ensure_running()  # the server would start it, and that unblocks SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _keep_sockets_reachable() -> None:
    """Have multiprocessing keep its sockets, also those of workers, where their paths are short enough."""
    folder = util.get_temp_dir()
    if len(os.fsencode(folder)) <= _MAX_FOLDER_LENGTH:
        return
    for parent in _SHORT_FOLDERS:
        with contextlib.suppress(OSError):
            short = tempfile.mkdtemp(prefix="gossip-", dir=parent)
            util.Finalize(None, shutil.rmtree, args=(short, True), exitpriority=-100)
            process.current_process()._config["tempdir"] = short  # type: ignore[attr-defined]
            return
    raise LaunchError(
        f"TMPDIR: sockets of workers would be in {folder}, whose path is longer than the {_MAX_FOLDER_LENGTH} bytes "
        f"that are allowed, and {', '.join(_SHORT_FOLDERS)} cannot be written; set TMPDIR to a shorter path"
    )


def stop() -> None:
    """Kill the fork server when no worker is left; by itself it exits after its launcher, but not while importing."""
    if (pid := getattr(forkserver._forkserver, "_forkserver_pid", None)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""Python programs as forks of a process that has imported torch already, where a fresh interpreter would for seconds.

Each is in a session of its own, with its own arguments, environment, folder, output, signals and exit status. What it
starts is forked too, before the program has begun to run: the fork server of its ranks, and under torchrun the ranks.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from gossip.launching import fork_server

TORCHRUN = "torch.distributed.run"
PRELOAD = (
    __name__,
    "gossip.lab.experiments.training",
    "gossip.lab.experiments.train_command",
    "gossip.lab.sweeps.sweeper",
    "hydra._internal.hydra",
    "hypothesis",
    "pytest",
    "safetensors.torch",
    "sklearn.datasets",
    "sklearn.model_selection",
)
"""What scripts import, the ranks that they start, and the modules of tests."""


class Program:
    """A Python program in a session of its own; as much of ``subprocess.Popen`` as is asked for.

    ``arguments`` begin with a script's path or :data:`TORCHRUN`; ``outputs`` are the descriptors of its standard output
    and standard error.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, outputs: tuple[int, int]
    ) -> None:
        files = [Connection(os.dup(output), readable=False) for output in outputs]  # is sent as its descriptor
        fork_server.start(PRELOAD)
        key = getattr(forkserver._forkserver, "_forkserver_authkey", None)  # from Python 3.14 on
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(list(arguments), dict(environment), folder, files, key)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode


def _run(
    arguments: list[str], environment: dict[str, str], folder: Path, outputs: list[Connection], key: bytes | None
) -> None:
    """The program's whole life."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the fork server has some blocked
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    os.chdir(folder)
    process.ORIGINAL_DIR = str(folder)  # where workers look for modules, as they do where their launcher began
    os.environ.clear()
    os.environ.update(environment)
    script, *_ = sys.argv = arguments
    try:
        if script == TORCHRUN:
            subprocess_handler.Popen = _forked_rank
            forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # it is that of the tests
            forkserver._forkserver._forkserver_authkey = key
            run.main()
        else:
            util.spawnv_passfds = _EarlyFork()
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _forked_rank(args: Sequence[str], env: Mapping[str, str], start_new_session: bool, **outputs: Any) -> Program:
    """``subprocess.Popen`` for torchrun's agent."""
    executable, unbuffered, *arguments = args
    assert (executable, unbuffered, start_new_session) == (sys.executable, "-u", True)
    assert set(outputs.values()) == {None}
    return Program(arguments, env, Path.cwd(), (1, 2))


class _EarlyFork:
    """``multiprocessing.util.spawnv_passfds`` of the fork server, by a process that is forked now and waits for it."""

    def __init__(self) -> None:
        self._spawn = util.spawnv_passfds
        self._ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            self._wait(theirs)
            os._exit(0)
        theirs.close()

    def __call__(self, path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        *_, code = arguments
        if "forkserver" not in code:
            return self._spawn(path, arguments, descriptors)
        code = code.replace("main({}, {}".format(*descriptors), "main(*descriptors")
        mask = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))  # is inherited
        socket.send_fds(self._ours, [json.dumps((mask, code)).encode()], descriptors)
        self._ours.close()
        return self._pid

    @staticmethod
    def _wait(asked: socket.socket) -> None:
        """Become the fork server, if there is to be one."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})  # is not there for the user yet
        message, descriptors, _, _ = socket.recv_fds(asked, 2**16, 2)
        asked.close()
        if message:
            mask, code = json.loads(message)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            exec(code, {"descriptors": descriptors})

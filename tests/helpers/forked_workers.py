"""The workers of a benchmark as forks of a process that has imported torch already.

What a fresh interpreter adds is seen where scripts/bench.py and scripts/predicted_steps.py run as a user runs them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, ClassVar
from unittest import mock

from preloaded import Program

from gossip.lab.benchmarks import worker_processes
from gossip.lab.benchmarks.network import goodput, namespaces


class ForkedWorker(Program):
    """Stands for the ``subprocess.Popen`` of a worker: on the host of this thread, its life hanging on ``stdin``."""

    pids: ClassVar[list[int]] = []
    """Of all that this process has started."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool,
    ) -> None:
        _, option, module, benchmark, place = command
        assert option == "-m"
        script = importlib.import_module(module).__file__
        assert script is not None
        assert stdin == subprocess.PIPE
        assert start_new_session
        reading, writing = os.pipe()
        host = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        before = functools.partial(_begin, Connection(reading, writable=False), Connection(host, writable=False))
        outputs = stdout.fileno(), stderr.fileno()
        super().__init__([script, benchmark, place], env, Path.cwd(), outputs, before)
        self.stdin = os.fdopen(writing, "wb")
        self.pids.append(self.pid)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _begin(stdin: Connection, host: Connection) -> None:
    with contextlib.suppress(PermissionError):  # who may not enter a namespace has not left the only one
        namespaces._call("setns", host.fileno(), namespaces._CLONE_NEWNET)
    goodput._WARM_UP_S, goodput._WINDOW_S = 0.05, 0.1  # both directions of all links are busy meanwhile, and the cores
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    host.close()


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Within the block the workers of benchmarks are forked."""
    started_by = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE)
    with mock.patch.object(worker_processes, "subprocess", started_by):
        yield

"""Runs scripts as a user does: in a process group of their own, or, for what they say, in this process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from unittest import mock

from repository import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
TRAIN = SCRIPTS / "train.py"
SWEEP = SCRIPTS / "sweep.py"
MODELS = REPOSITORY / "tests" / "helpers"  # faulty_models.py
TIMEOUT_S = 120
GRACE_S = 3.0


@dataclass(frozen=True)
class Finished:
    """What a finished process left: its status, its words, the processes of its group that are still there."""

    status: int
    stdout: str
    stderr: str
    left_running: tuple[int, ...]

    @property
    def last_line(self) -> str:
        """The last thing that it said on stderr."""
        return self.last_lines(1)[0]

    def last_lines(self, count: int) -> list[str]:
        """The last lines that it said on stderr."""
        return self.stderr.strip().splitlines()[-count:]


def train(folder: Path, *overrides: str, torchrun: int = 0, max_restarts: int = 0) -> Finished:
    """Run the script in ``folder``; with ``torchrun`` ranks under torchrun."""
    with _start(folder, *overrides, torchrun=torchrun, max_restarts=max_restarts) as process:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Finished(process.returncode, stdout, stderr, _group(process.pid))


def sweep(folder: Path, *overrides: str) -> Finished:
    """Run scripts/sweep.py in ``folder``."""
    with _start(folder, *overrides, script=SWEEP) as process:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Finished(process.returncode, stdout, stderr, _group(process.pid))


def run_here(script: str, *arguments: str | Path, stdout: TextIO | None = None) -> Finished:
    """Run one of scripts/ in this process: what a fresh interpreter adds is seen once for each script, elsewhere.

    What it prints is written to ``stdout`` if that is given, else it is returned.
    """
    printed, stderr = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    status: int | str | None = 0
    with (
        mock.patch.object(sys, "argv", [script, *map(str, arguments)]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(stdout or printed),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Finished(status or 0, printed.getvalue(), stderr.getvalue(), ())


@contextlib.contextmanager
def running(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Within the block the script runs; afterwards its process group is killed."""
    with _start(folder, *overrides) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_S)


def _start(
    folder: Path, *overrides: str, torchrun: int = 0, max_restarts: int = 0, script: Path = TRAIN
) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    if max_restarts:
        launcher.append(f"--max-restarts={max_restarts}")
    python_path = os.pathsep.join([str(MODELS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_folders(folder: Path) -> list[Path]:
    """The folders that runs made, oldest first."""
    return sorted((folder / "outputs").iterdir())


def _ends(process_id: int) -> bool:
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], GRACE_S)[0])
    finally:
        os.close(descriptor)


def _group(leader: int) -> tuple[int, ...]:
    """The processes of a process group that do not end within the time that Ctrl-C has."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z" and not _ends(int(status.parent.name)):
            members.append(int(status.parent.name))
    return tuple(members)

"""Runs scripts as a user does: in a process group of their own, or, for what they say, in this process."""

import contextlib
import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO
from unittest import mock

from preloaded import TORCHRUN, Program
from repository import REPOSITORY

from gossip.lab.experiments.records import read_jsonl, record_files

SCRIPTS = REPOSITORY / "scripts"
TRAIN = SCRIPTS / "train.py"
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

    def succeeded(self) -> "Finished":
        assert self.status == 0, self.stderr
        return self

    @property
    def last_line(self) -> str:
        """The last thing that it said on stderr."""
        return self.last_lines(1)[0]

    def last_lines(self, count: int) -> list[str]:
        """The last lines that it said on stderr."""
        return self.stderr.strip().splitlines()[-count:]


class Running:
    """A script that runs in a process group of its own."""

    def __init__(self, process: Program | subprocess.Popen[bytes], outputs: Sequence[IO[str]]) -> None:
        self.process, self._outputs = process, outputs

    def first_line(self) -> str:
        """The first line of its standard output, as soon as that is there, without what gloo of torch 2.10 writes."""
        return self.first_lines(1)[0]

    def first_lines(self, count: int) -> list[str]:
        """The first lines of its standard output, likewise."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            # Not by seeking: the script writes at the same place.
            *lines, _ = os.pread(self._outputs[0].fileno(), 1 << 16, 0).decode().split("\n")
            found = [line for line in lines if line and not line.startswith("[Gloo]")]
            if len(found) >= count:
                return found[:count]
            assert self.process.poll() is None, self.finished()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finished(self) -> Finished:
        """Wait for its end."""
        status = self.process.wait(TIMEOUT_S)
        for output in self._outputs:
            output.seek(0)
        stdout, stderr = (output.read() for output in self._outputs)
        return Finished(status, stdout, stderr, _group(self.process.pid))


@contextlib.contextmanager
def running(
    folder: Path, *arguments: str, script: Path = TRAIN, torchrun: int = 0, fresh: bool = False
) -> Iterator[Running]:
    """Within the block the script runs in ``folder``; afterwards its process group is killed.

    With ``torchrun`` ranks under torchrun. ``fresh``: in a fresh interpreter, as users have it; else in a process that
    has been forked of one that has imported what scripts need.
    """
    launcher = [TORCHRUN, "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    command = [*launcher, str(script), *arguments]
    python_path = os.pathsep.join([str(MODELS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python_path}
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process: Program | subprocess.Popen[bytes]
        if fresh:
            process = subprocess.Popen(
                [sys.executable, *(["-m"] if torchrun else []), *command],
                cwd=folder,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        else:
            process = Program(command, environment, folder, (stdout.fileno(), stderr.fileno()))
        try:
            yield Running(process, (stdout, stderr))
        finally:
            for kill in (os.killpg, os.kill):  # it may not have begun its session yet
                with contextlib.suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)


def written(folder: Path, text: str) -> Path:
    """A program of the test's own, in ``folder``."""
    path = folder / "program.py"
    path.write_text(text)
    return path


def run(script: str | Path, folder: Path, *arguments: str, **options: Any) -> Finished:
    """Run one of scripts/, or a path, in ``folder`` to its end; the options are those of :func:`running`."""
    with running(folder, *arguments, script=SCRIPTS / script, **options) as process:
        return process.finished()


def train(folder: Path, *overrides: str, **options: Any) -> Finished:
    """Run scripts/train.py in ``folder``."""
    return run("train.py", folder, *overrides, **options)


def program(
    *command: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    patience_s: float = TIMEOUT_S,
) -> str:
    """What a program prints that ends well."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def run_folders(folder: Path) -> list[Path]:
    """The folders that runs made, oldest first."""
    return sorted((folder / "outputs").iterdir())


def summary_of(folder: Path) -> dict[str, Any]:
    """That of the only run that was made in ``folder``."""
    (run,) = run_folders(folder)
    return json.loads((run / "summary.json").read_text())


def left_in(folder: Path, kept: Sequence[str] = ()) -> dict[str, Any]:
    """All that a run has left but overrides and times; of its records only what is kept, if anything is named."""

    def timeless(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if not key.endswith("_s") and key != "overrides"}

    summary = timeless(json.loads((folder / "summary.json").read_text()))
    by_rank = {path.name: read_jsonl(path) for path in record_files(folder)}
    records = {
        name: [{key: record.get(key) for key in kept or timeless(record)} for record in of_rank]
        for name, of_rank in by_rank.items()
    }
    return {"summary": summary, "records": records, "model": (folder / "model.safetensors").read_bytes()}


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

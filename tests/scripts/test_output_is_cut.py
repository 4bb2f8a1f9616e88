"""Programs whose output nobody reads to its end, as in ``--help | head``: they end without a word."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S, TRAIN, run_here

from topologies.command_lines import CUT, ends_quietly

PROGRAMS = {"train": [str(TRAIN), "--cfg", "job"], "topologies": ["-m", "topologies", "list"]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_whose_output_is_cut_ends_quietly(name: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)  # the reader has gone before the program writes anything
    try:
        run = subprocess.run(
            [sys.executable, *PROGRAMS[name]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(write)
    assert run.stderr == ""
    assert run.returncode in (0, CUT)  # argparse passes over the error when it prints help
    assert not list(tmp_path.iterdir())


@pytest.fixture
def closed_pipe() -> Iterator[TextIO]:
    """Is closed as at an interpreter's end: nothing may be left to write."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        yield stdout


def test_help_that_is_cut_ends_quietly(closed_pipe: TextIO) -> None:
    help_ = run_here("bench.py", "--help", stdout=closed_pipe)
    closed_pipe.close()
    assert help_.stderr == ""
    assert help_.status in (0, CUT)


def test_refusal_is_told_where_the_output_is_cut(
    closed_pipe: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run_here(TRAIN.name, "seed=x", stdout=closed_pipe)
    closed_pipe.close()
    assert (refused.status, refused.stderr) == (2, "error: seed must be a valid integer, got 'x'\n")


def test_another_broken_pipe_is_an_error() -> None:
    def main() -> int:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        ends_quietly(main)

"""The scripts that measure compressions, ways of exchange, memory, uneven ranks and virtual workers print a table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S, run_here


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / script, *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("compression_speed.py", ["--numel", "5000", "--repetitions", "1"], ["none", "bf16", "int8", "int4", "choco"]),
        ("virtual_speed.py", ["--world-sizes", "3", "8", "--repetitions", "1", "--loop-up-to", "3"], ["3", "8"]),
        ("exchange_ways.py", ["--world-size", "2", "--repetitions", "1"], ["2 | 1", "2 | 64", "2 | 16800"]),
        (
            "sharded_memory.py",
            ["--width", "16", "--depth", "2"],
            ["each rank a replica", "shard=none", "shard=optimizer, 4 ranks", "fully_shard, 4 ranks"],
        ),
        (
            "uneven_ranks.py",
            ["--world-size", "2", "--steps", "4", "--compute-ms", "1", "--seeds", "1", "--width", "8"],
            ["local", "ddp", "adapt_while_communicating", "asynchronous"],
        ),
    ],
)
def test_scripts_print_a_row_for_each(script: str, options: list[str], rows: list[str]) -> None:
    done = run(script, *options)
    assert done.returncode == 0, done.stderr
    for row in rows:
        assert f"\n| {row} |" in done.stdout


@pytest.mark.parametrize("script", ["compression_speed.py", "exchange_ways.py", "virtual_speed.py"])
def test_bad_numbers_are_refused_in_one_line(script: str) -> None:
    done = run_here(script, "--repetitions", "0")
    assert done.status == 2
    assert "at least 1" in done.last_line

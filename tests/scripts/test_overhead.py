"""scripts/overhead.py on very few steps: the form of its tables, and what takes how much memory; never a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S

pytestmark = pytest.mark.xdist_group("overhead")  # what its fixtures make is made once

NUM_PARAMETERS = 250 * (8 * 8 + 8)
BUCKET_BYTES = 10_000


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it prints and what it writes."""
    output = tmp_path_factory.mktemp("overhead") / "overhead.json"
    arguments = [
        "--steps=2",
        "--models",
        "small_tensors",
        "--differences",
        f"--bucket-cap-mb={BUCKET_BYTES / 2**20}",
        "--output",
        output,
    ]
    run = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "overhead.py", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(output.read_text())


@pytest.mark.slow
def test_overhead_prints_three_tables_with_a_row_per_case(measured: tuple[str, dict[str, Any]]) -> None:
    stdout, content = measured
    tables = [block.splitlines() for block in stdout.strip().split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table, rows in zip(tables, content.values(), strict=True):
        assert len({line.count("|") for line in table}) == 1
        names = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table]
        assert names[0] == ("model", "mode")
        assert names[2:] == [(row["model"], row["mode"]) for row in rows]
    assert {"control", "fused"} <= {row["mode"] for row in content["time"]}
    for row in content["time"]:
        assert 0 < row["ratio_lower_quartile"] <= row["ratio"] <= row["ratio_upper_quartile"]


@pytest.mark.slow
def test_overhead_counts_the_memory_of_the_update(measured: tuple[str, dict[str, Any]]) -> None:
    plain, fused = (row for row in measured[1]["memory_bytes"] if row["mode"] in ("control", "fused"))
    size = 4 * NUM_PARAMETERS
    num_tensors = 500
    adamw = 2 * size + 4 * num_tensors  # the step counters are tensors
    for row, num_messages in ((plain, 0), (fused, 2)):
        assert (row["parameters"], row["state"]) == (size, adamw)
        assert row["messages"] == num_messages * size
        assert row["total"] >= row["parameters"] + row["state"] + row["messages"] + row["gradients"]
        assert row["total"] <= row["bound"] + BUCKET_BYTES
    assert plain["gradients"] == size
    assert 0 < fused["gradients"] <= BUCKET_BYTES  # the others come later or have been used up

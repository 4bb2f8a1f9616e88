"""scripts/topology_scale.py at small sizes: its tables; never a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S


@pytest.mark.slow
def test_scale_prints_a_row_for_every_variant_and_every_large_family() -> None:
    run = subprocess.run(
        [
            sys.executable,
            REPOSITORY / "scripts" / "topology_scale.py",
            "--world-size=15",
            "--large-world-size=1000",
            "--families",
            "de_bruijn",
            "one_peer_hypercube",
            "random_matching",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert run.returncode == 0, run.stderr
    first, second = ([line.split() for line in table.splitlines()] for table in run.stdout.strip().split("\n\n"))
    assert [row[:3] for row in first[2:]] == [
        ["de_bruijn", "16", "p=2"],
        ["de_bruijn", "16", "p=4"],
        ["one_peer_hypercube", "16", first[4][2]],
        ["random_matching", "15", "seed=0"],
    ]
    assert [row[:2] for row in second[2:]] == [["one_peer_hypercube", "1024"], ["random_matching", "1000"]]
    for row in first[2:]:
        numbers = [float(cell) for cell in row if cell.replace(".", "").isdigit()]
        assert len(numbers) == 8
        assert all(number >= 0 for number in numbers)

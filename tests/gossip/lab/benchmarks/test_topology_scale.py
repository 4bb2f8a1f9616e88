"""What large topologies cost: a row for each, also for one whose worker found too little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossip import LaunchError
from gossip.lab.benchmarks import harness
from gossip.lab.benchmarks.topology_scale import TopologyScaleSettings


def test_a_worker_that_is_killed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_workers(name: str, case: TopologyScaleSettings, *_: object) -> list[list[dict[str, Any]]]:
        if case.options is not None:
            raise LaunchError("rank 0 failed: the process ended\nwith signal 9 (SIGKILL)", rank=0)
        return [[{"family": name, "n": case.size}]]

    monkeypatch.setattr(harness, "run_workers", run_workers)
    settings = TopologyScaleSettings(world_size=4, families=("ring",), large_world_size=16)
    (of_ring, of_large), report = harness.run("topology_scale", settings, tmp_path)
    assert of_ring.rows[0]["failed"].endswith("the process ended with signal 9 (SIGKILL)")
    assert of_large.rows[0]["n"] == 16
    assert "| family | n | options | failed |" in report

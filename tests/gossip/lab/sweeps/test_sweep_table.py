"""The table over the runs of a sweep."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gossip.lab.sweeps.sweeper import finish_sweep

COMPLETED = {
    "status": "completed",
    "reason": "",
    "averaged_test_accuracy": 0.975,
    "local_test_accuracy_mean": 0.97,
    "local_test_accuracy_worst": 0.96,
    "consensus_distance_before": 0.2,
    "consensus_distance_before_relative": 0.01,
    "steps": 12,
    "wall_time_s": 3.21,
    "training_time_s": 1.5,
    "exposed_wait_s": 0.4,
    "bytes_sent_per_step": 2048.0,
}


def leave(folder: Path, summary: dict[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").touch()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


def test_sweep_table_gathers_all_runs_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "10", None)
    leave(tmp_path / "0" / "mlflow_artifacts", COMPLETED)  # a logger's copy is no run
    leave(tmp_path / "9", {"status": "failed", "reason": "because", "overrides": ["seed=1", "topology=ring"]})
    leave(tmp_path / "0", {**COMPLETED, "consensus_distance_before": None, "overrides": ["seed=0", "topology=ring"]})
    summaries = finish_sweep(tmp_path)
    assert [(summary["job"], summary["status"]) for summary in summaries] == [
        ("0", "completed"),
        ("9", "failed"),
        ("10", "failed"),
    ]
    with (tmp_path / "sweep.csv").open() as file:
        completed, failed, silent = csv.DictReader(file)
    assert (completed["averaged_test_accuracy"], completed["steps"]) == ("0.975", "12")
    assert (failed["overrides"], failed["reason"], failed["steps"]) == ("seed=1 topology=ring", "because", "")
    assert silent["reason"] == "its process ended without leaving summary.json"
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "job 9 failed: because"
    assert printed.splitlines()[-1] == f"3 runs: {tmp_path}/sweep.csv"

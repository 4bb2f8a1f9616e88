"""Measuring a case next to its prediction runs as a whole; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossip.lab.benchmarks import predicted_steps
from gossip.lab.benchmarks.harness import run
from gossip.lab.benchmarks.predicted_steps import Case, PredictedStepsSettings
from gossip.lab.experiments.validated_models import read

METHODS = ("local", "ddp", "ring")


@pytest.mark.slow
def test_measured_case_can_be_written_read_and_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_steps, "_NODES", (2, 4))
    content = {
        "methods": METHODS,
        "rates": "1gbit",
        "stragglers": ["one_slow"],
        "world_size": 2,
        "steps": 2,
        "model": "small_mlp",
        "scale": True,
    }
    settings = read(PredictedStepsSettings, {**content, "network": "loopback"})
    (case,), report = run("predicted_steps", settings, tmp_path)
    assert tuple(case.step_s) == METHODS
    assert min(case.step_s.values()) > 0
    assert (case.cluster.num_nodes, case.cluster.local_size) == (1, 2)
    assert sum(case.workload.bucket_bytes) == pytest.approx(4.2e6, rel=0.01)
    (found,) = (Case.model_validate(each) for each in json.loads((tmp_path / "results.json").read_text())["results"])
    assert all(found.predict(method) == case.predict(method) > 0 for method in METHODS)
    computing_s = found.workload.forward_s + found.workload.backward_s + found.workload.update_s
    assert found.predict("local") == pytest.approx(1.5 * computing_s, rel=0.1)
    assert report.count("| loopback | one_slow | ") == len(METHODS)
    assert "7 billion parameters" in (tmp_path / "scale.svg").read_text(encoding="utf-8")

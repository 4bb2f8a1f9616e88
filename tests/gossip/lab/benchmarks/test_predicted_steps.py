"""Measuring a case next to its prediction runs as a whole; no time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_hosts import why_no_hosts
from repository import REPOSITORY
from running import run_here

from gossip.lab.benchmarks.harness import run
from gossip.lab.benchmarks.predicted_steps import Case, PredictedStepsSettings
from gossip.lab.experiments.validated_models import read

SCRIPT = REPOSITORY / "scripts" / "predicted_steps.py"
METHODS = ("local", "ddp", "ring")


def predicted_steps(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


@pytest.mark.slow
def test_measured_case_can_be_written_read_and_predicted(tmp_path: Path) -> None:
    content = {"methods": METHODS, "rates": "1gbit", "stragglers": ["one_slow"], "world_size": 2, "steps": 2}
    settings = read(PredictedStepsSettings, {**content, "network": "loopback"})
    (case,), report = run("predicted_steps", settings, tmp_path)
    assert tuple(case.step_s) == METHODS
    assert min(case.step_s.values()) > 0
    assert (case.cluster.num_nodes, case.cluster.local_size) == (1, 2)
    assert len(case.workload.bucket_bytes) == 4
    (found,) = (Case.model_validate(each) for each in json.loads((tmp_path / "results.json").read_text())["results"])
    assert all(found.predict(method) == case.predict(method) > 0 for method in METHODS)
    computing_s = found.workload.forward_s + found.workload.backward_s + found.workload.update_s
    assert found.predict("local") == pytest.approx(1.5 * computing_s, rel=0.1)
    assert report.count("| loopback | one_slow | ") == len(METHODS)


@pytest.mark.slow
@pytest.mark.root
def test_script_measures_in_the_lab(tmp_path: Path) -> None:
    missing = why_no_hosts()
    if missing is not None:
        pytest.skip(missing)
    folder = tmp_path / "steps"
    options = ("--rates=400mbit", "--stragglers=none", "--world-size=2", "--steps=2")
    done = predicted_steps(str(folder), *options, "--methods", *METHODS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| 400mbit | none | ") == len(METHODS)
    (case,) = json.loads((folder / "results.json").read_text())["results"]
    assert (case["cluster"]["num_nodes"], case["cluster"]["local_size"]) == (2, 1)  # each host is a node
    assert 0 < case["cluster"]["bandwidth_gbps"] < 0.5


def test_script_refuses_a_bad_rate_in_one_line() -> None:
    done = run_here("predicted_steps.py", "--rates=fast")
    assert done.status == 2
    assert done.last_line.endswith("rate must be a number with kbit, mbit or gbit, such as 200mbit, got 'fast'")

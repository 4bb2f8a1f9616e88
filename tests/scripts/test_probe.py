"""scripts/probe.py as a user runs it: on its own, and under torchrun. Its times are never looked at."""

import json
from pathlib import Path

import pytest
from running import run

TINY = ("--parameters-mb=0.05", "--batch-size=2", "--steps=2", "--message-mb=0.1")


@pytest.mark.slow
def test_probe_measures_predicts_and_says_one_sentence(tmp_path: Path) -> None:
    done = run("probe.py", tmp_path, "found", *TINY, "--world-size=2", "--bucket-cap-mb=0.01", fresh=True).succeeded()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Measured on 2 ranks")
    assert lines[-1].startswith(("Gossip helps here: take ", "Gossip does not help here: ", "Cannot tell "))
    (content,) = json.loads((tmp_path / "found" / "results.json").read_text())["results"]
    assert content["advice"] == lines[-1]
    assert content["cluster"]["num_nodes"] == 1  # one machine
    assert content["cluster"]["local_size"] == 2
    assert content["cluster"]["local_bandwidth_gbps"] > 0
    assert content["workload"]["forward_s"] > 0
    assert 0 <= content["workload"]["contention"] <= 1
    assert len(content["workload"]["bucket_bytes"]) == 8
    assert "one_peer_exponential" in {row["method"] for row in content["predictions"]}


def test_probe_joins_torchrun_and_prints_once(tmp_path: Path) -> None:
    done = run("probe.py", tmp_path, *TINY, torchrun=2).succeeded()
    assert done.stdout.count("Measured on 2 ranks, 1 node") == 1

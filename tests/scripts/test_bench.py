"""scripts/bench.py as a user runs it."""

import json
import os
from pathlib import Path

import pytest
from running import run_here

TINY = ("bench.world_size=2", "bench.model=cnn", "bench.repetitions=1", "bench.warmup_steps=2", "bench.steps=2")
ONE_ROW = ("bench/methods=buckets", "bench.methods.gossip.bucket_cap_mb=25", "bench.methods.gossip.compression=none")
STARTS_ITSELF = "benchmark starts its ranks itself: start it without torchrun or srun"


def test_bench_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_here("bench.py", "--multirun")
    assert done.status == 2
    assert done.last_line == "error: the benchmark measures all methods in one run: give lists, and leave out -m"
    assert len(done.stderr.strip().splitlines()) == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for refused in (run_here("bench.py"), run_here("overhead.py")):
        assert (refused.status, refused.last_line.partition(": a ")[2]) == (2, STARTS_ITSELF)


def test_bench_without_a_lab_says_so_and_on_loopback_leaves_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # neither ip nor tc
    monkeypatch.chdir(tmp_path)
    refused = run_here("bench.py", *TINY, *ONE_ROW, "bench.network=lab")
    why = "network namespaces need root" if os.geteuid() != 0 else "ip and tc not found: install iproute2"
    assert (refused.status, refused.last_line) == (2, f"error: no lab: {why}")
    done = run_here("bench.py", *TINY, *ONE_ROW, "bench.straggler=exponential").succeeded()
    (folder,) = (tmp_path / "outputs").iterdir()
    text = (folder / "bench.md").read_text()
    assert text in done.stdout
    assert "2 ranks on loopback, 1 thread each" in text
    (result,) = json.loads((folder / "bench.json").read_text())["results"]
    assert result["rate"] is None
    assert {row["kind"] for row in result["rows"]} == {"local", "gossip"}
    assert "| method | step to local | throughput to local |" in text
    assert (folder / "config.yaml").exists()

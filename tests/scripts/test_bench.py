"""scripts/bench.py as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S, run_here

TINY = ("bench.world_size=2", "bench.model=cnn", "bench.repetitions=1", "bench.warmup_steps=2", "bench.steps=2")
ONE_ROW = ("bench/methods=buckets", "bench.methods.gossip.bucket_cap_mb=25", "bench.methods.gossip.compression=none")


# Its bytes are those of the whole loopback interface: of one of its own where that can be had, or other tests' too.
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
CAN_BE_ALONE = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip")))


def bench(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(ALONE if CAN_BE_ALONE else ()), sys.executable, str(REPOSITORY / "scripts" / "bench.py"), *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.slow
def test_bench_leaves_a_table_and_figures(tmp_path: Path) -> None:
    done = bench(tmp_path, *TINY, "bench/methods=stragglers", "bench.straggler=exponential")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    text = (folder / "bench.md").read_text()
    assert text in done.stdout
    assert "2 ranks on loopback, 1 thread each" in text
    content = json.loads((folder / "bench.json").read_text())
    (result,) = content["results"]
    assert result["rate"] is None
    kinds = {row["kind"]: row for row in result["rows"]}
    assert {"local", "ddp", "gossip"} <= set(kinds)
    assert kinds["local"]["step_s"]["high"] > 0
    # What gossip's ranks have for each other lies in the memory of this machine.
    assert kinds["ddp"]["sent_bytes"] > 1000 + max(kinds[kind]["sent_bytes"] for kind in ("local", "gossip"))
    assert {ratio["reference"] for ratio in result["ratios"]} >= {"local", "ddp"}
    assert (folder / "parts.svg").read_text().count("gossip") >= 1
    assert (folder / "config.yaml").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("bench.steps=none", "error: bench.steps must be a valid integer, got 'none'"),
        ("bench.stepps=3", "error: the configuration has no key bench.stepps; did you mean bench.steps?"),
        ("bench/methods=mian", "error: there is no bench/methods=mian; did you mean main?"),
        ("--multirun", "error: the benchmark measures all methods in one run: give lists, and leave out -m"),
    ],
)
def test_bench_refusals_are_one_line(
    override: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_here("bench.py", override)
    assert done.status == 2
    assert done.last_line.startswith(words)
    assert len(done.stderr.strip().splitlines()) == 1


def test_bench_without_a_lab_says_so_and_runs_unshaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # neither ip nor tc
    monkeypatch.chdir(tmp_path)
    done = run_here("bench.py", *TINY, *ONE_ROW, "bench.network=lab")
    assert done.status == 0, done.stderr
    why = "network namespaces need root" if os.geteuid() != 0 else "ip and tc not found: install iproute2"
    assert f"no lab: {why}; the links are loopback, unshaped" in done.stderr
    assert f"- no lab: {why}" in done.stdout
    assert "2 ranks on loopback" in done.stdout

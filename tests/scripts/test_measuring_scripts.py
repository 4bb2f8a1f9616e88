"""The scripts that measure print their tables and draw their figures, as users run them; times are never looked at."""

import json
import os
import re
from pathlib import Path

import pytest
from lab_hosts import why_no_hosts
from report_documents import document, row
from running import run, run_here

from gossip.lab.benchmarks.large_model import WAYS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("compression_speed.py", ["--numel=5000", "--repetitions=1"], ["none", "bf16", "int8", "int4", "choco"]),
        (
            "overhead.py",
            ["--steps=2", "--models=small_tensors", "--modes", "control", "fused"],
            [f"small_tensors | {mode}" for mode in ("control", "fused")],
        ),
    ],
)
def test_scripts_print_a_row_for_each(script: str, options: list[str], rows: list[str], tmp_path: Path) -> None:
    done = run(script, tmp_path, *options).succeeded()
    for start in rows:
        assert f"\n| {start} |" in done.stdout


@pytest.mark.slow
def test_a_large_model_has_the_same_losses_however_it_is_sharded(tmp_path: Path) -> None:
    folder, ways = tmp_path / "run", [name for name, way in WAYS.items() if way.num_replicas == 2]
    sizes = ["--width=32", "--depth=1", "--vocabulary=128", "--tokens=8", "--dtype=float64", "--steps=6"]
    run("large_model.py", tmp_path, str(folder), *sizes, "--ways", *ways).succeeded()
    results = json.loads((folder / "results.json").read_text())["results"]
    losses = {row["way"]: row["losses"] for result in results for row in result["rows"]}
    for name in ways:
        way = WAYS[name]
        if way.like is not None:
            is_rounded = way.like == "int8" or "compression" in way.options
            assert losses[name] == pytest.approx(losses[way.like], rel=1e-4 if is_rounded else 1e-11), name


@pytest.mark.parametrize(
    ("script", "option", "words"),
    [
        ("overhead.py", "--steps=1", "steps must be greater than or equal to 2, got 1"),
        ("overhead.py", "--models=transformr", "; did you mean transformer?"),
    ],
)
def test_bad_values_are_refused_in_one_line(script: str, option: str, words: str) -> None:
    done = run_here(script, option)
    assert done.status == 2
    assert words in done.last_line


NUM_LAYERS, NUM_STEPS = 3, 3
MESSAGE, WAIT = "#fd8d3c", "#de2d26"


@pytest.mark.slow
@pytest.mark.root
def test_gossip_is_drawn_above_ddp_over_the_same_time(tmp_path: Path) -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)
    options = (f"--num-layers={NUM_LAYERS}", "--width=40", "--batch-size=2")
    run("overlap_figure.py", tmp_path, "found", *options, fresh=True).succeeded()
    svg = (tmp_path / "found" / "overlap_200mbit.svg").read_text()
    gossip, ddp = re.split(r'id="axes_\d"', svg.partition('id="legend_1"')[0])[1:]
    assert re.search(r"<!-- GossipDataParallel, one_peer_hypercube: 3 steps in \d+ ms -->", gossip)
    assert re.search(r"<!-- torch's DistributedDataParallel: 3 steps in \d+ ms -->", ddp)
    assert gossip.count(f"fill: {MESSAGE}") >= (NUM_STEPS - 1) * NUM_LAYERS  # those of the last step come later
    assert ddp.count(f"fill: {MESSAGE}") >= NUM_STEPS * NUM_LAYERS
    assert ddp.count(f"fill: {WAIT}") >= NUM_STEPS


def test_both_distances_of_a_sweep_are_drawn_if_both_are_known(tmp_path: Path) -> None:
    older = row("ring")
    del older["curves"]["consensus_absolute"]
    for known, num_expected in ((row("ring"), 1), (older, 0)):
        (tmp_path / "results.json").write_text(json.dumps(document([known])), encoding="utf-8")
        run_here("comparison_figure.py", tmp_path, tmp_path / "figure.svg").succeeded()
        drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
        assert drawn.count("<!-- relative consensus distance -->") == 1
        assert drawn.count("<!-- consensus distance -->") == num_expected


TINY_BENCH = ("bench.world_size=2", "bench.model=cnn", "bench.repetitions=1", "bench.warmup_steps=2", "bench.steps=2")
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
    refused = run_here("bench.py", *TINY_BENCH, *ONE_ROW, "bench.network=lab")
    why = "network namespaces need root" if os.geteuid() != 0 else "ip and tc not found: install iproute2"
    assert (refused.status, refused.last_line) == (2, f"error: no lab: {why}")
    done = run_here("bench.py", *TINY_BENCH, *ONE_ROW, "bench.straggler=exponential").succeeded()
    (folder,) = (tmp_path / "outputs").iterdir()
    text = (folder / "bench.md").read_text()
    assert text in done.stdout
    assert "2 ranks on loopback, 1 thread each" in text
    (result,) = json.loads((folder / "bench.json").read_text())["results"]
    assert result["rate"] is None
    assert {row["kind"] for row in result["rows"]} == {"local", "gossip"}
    assert "| method | step to local | throughput to local |" in text
    assert (folder / "config.yaml").exists()


TINY_PROBE = ("--parameters-mb=0.05", "--batch-size=2", "--steps=2", "--message-mb=0.1")


@pytest.mark.slow
def test_probe_measures_predicts_and_says_one_sentence(tmp_path: Path) -> None:
    done = run(
        "probe.py", tmp_path, "found", *TINY_PROBE, "--world-size=2", "--bucket-cap-mb=0.01", fresh=True
    ).succeeded()
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
    done = run("probe.py", tmp_path, *TINY_PROBE, torchrun=2).succeeded()
    assert done.stdout.count("Measured on 2 ranks, 1 node") == 1

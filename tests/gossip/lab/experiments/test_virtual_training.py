"""All replicas in one process: the same run as one process per rank, and what it leaves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from composing import composed

from gossip.lab.experiments.job import run_job
from gossip.lab.experiments.records import read_jsonl, record_files
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.experiments.terminal import print_run
from gossip.lab.experiments.validated_models import read

pytestmark = pytest.mark.slow  # together

SHORT = ("training.steps=8", "training.evaluate_every_steps=4", "training.batch_size=8", "model.hidden=[12]")
NOT_IID = ("data.partition.scheme=dirichlet", "data.partition.alpha=0.3", "figures=false")


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    run_job(composed(*SHORT, *NOT_IID, *overrides), folder, overrides)
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "method",
    [
        ("topology=star", "algorithm=adapt_then_combine", "wrapper.clip_grad_norm=0.5"),
        ("method=ddp", "wrapper.clip_grad_norm=0.5"),
    ],
    ids=lambda method: "_".join(method),
)
def test_virtual_run_is_that_of_processes(tmp_path: Path, method: tuple[str, ...]) -> None:
    processes = run(tmp_path / "processes", *method, "engine=processes", "launch.world_size=4")
    virtual = run(tmp_path / "virtual", *method, "engine=virtual", "launch.world_size=4")
    assert virtual.keys() == processes.keys()
    assert (processes["engine"], virtual["engine"]) == ("processes", "virtual")
    for key in ("steps", "epochs", "method", "topology", "algorithm", "compression", "clipping", "world_size", "data"):
        assert virtual[key] == processes[key]
    assert virtual["bytes_sent_per_step"] == pytest.approx(processes["bytes_sent_per_step"], rel=1e-6)
    for key in ("averaged_test_loss", "local_test_loss_mean", "local_test_loss_worst"):
        assert virtual[key] == pytest.approx(processes[key], rel=1e-4)
    for key in ("averaged_test_accuracy", "local_test_accuracy_worst", "local_test_accuracy_best"):
        assert virtual[key] == pytest.approx(processes[key], abs=1 / 360 + 1e-9)  # one image
    assert virtual["consensus_distance_before_relative"] == pytest.approx(
        processes["consensus_distance_before_relative"], rel=1e-3, abs=1e-6
    )
    (together,) = (read_jsonl(path) for path in record_files(tmp_path / "virtual"))
    by_rank = [read_jsonl(path) for path in record_files(tmp_path / "processes")]
    for of_all, *of_ranks in zip(together, *by_rank, strict=True):
        assert of_all["loss"] == pytest.approx(sum(record["loss"] for record in of_ranks) / 4, rel=1e-4)
        assert of_all["learning_rate"] == of_ranks[0]["learning_rate"]
        assert ("averaged_test_loss" in of_all) == ("averaged_test_loss" in of_ranks[0])


def test_virtual_run_leaves_and_shows_what_others_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(tmp_path, "engine=virtual", "launch.world_size=3", "figures=true", "topology=ring")
    assert summary["status"] == "completed"
    assert {path.suffix for path in tmp_path.iterdir()} == {".yaml", ".json", ".jsonl", ".safetensors", ".svg"}
    print_run(summary, tmp_path)
    shown = capsys.readouterr().out
    assert f"{summary['averaged_test_accuracy']:.2%}" in shown
    assert shown.endswith(f"run folder: {tmp_path} (figures: consensus.svg, topology.svg, training.svg)\n")
    parts_s = map(float, re.findall(r"of which .* (\d+\.\d) s", shown))
    assert sum(parts_s) == pytest.approx(summary["wall_time_s"], abs=0.2)
    records = read_jsonl(tmp_path / "workers.jsonl")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["step"] for record in records if "averaged_test_accuracy" in record] == [3, 7]


@pytest.mark.parametrize(("before", "after"), [("virtual", "processes"), ("processes", "virtual")])
def test_run_goes_on_with_the_other_engine(tmp_path: Path, before: str, after: str) -> None:
    saved = ("checkpoint.every=6", "launch.world_size=3", "topology=ring", "compression=int8")
    whole = run(tmp_path / "whole", *saved, "engine=virtual")
    folder = tmp_path / "changed"
    run(folder, *saved, f"engine={before}")
    (folder / "summary.json").unlink()  # as if it had been killed after step 6
    summary = run_job(composed(*SHORT, *NOT_IID, *saved, f"engine={after}", f"resume={folder}"), folder)
    assert (summary["engine"], summary["steps"]) == (after, 8)
    for key in ("averaged_test_loss", "local_test_loss_mean", "local_test_loss_worst"):
        assert summary[key] == pytest.approx(whole[key], rel=1e-4)
    assert summary["bytes_sent_per_step"] == pytest.approx(whole["bytes_sent_per_step"], rel=1e-3)  # some ranks resend
    files = record_files(folder)
    assert [path.name for path in files] == ["workers.jsonl", "rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]
    steps = {"virtual": [0, 6], "processes": [0, 6]} | {after: [6, 8]}
    for path in files:
        first, stop = steps["virtual" if path.name == "workers.jsonl" else "processes"]
        assert [record["step"] for record in read_jsonl(path)] == list(range(first, stop))


def test_batch_of_all_ranks_is_divided_among_them() -> None:
    config = composed("training.total_batch_size=64", "launch.world_size=16", "training.batch_size=5")
    assert read(Settings, config).batch_size == 4

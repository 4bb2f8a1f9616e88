"""What a sweep and its runs are called, whether a run has been made, and the table over all runs."""

import csv
from pathlib import Path
from typing import Any

import pytest
from composing import composed

from gossip.lab.experiments.run_folder import FolderError, claim, lock, write_failure, write_json
from gossip.lab.sweeps.sweep_jobs import Job, Run, fingerprint, folder_option, make_setting
from gossip.lab.sweeps.sweeper import finish_sweep

CHOICES = {"algorithm": "adapt_while_communicating", "compression": "none"}


def job(*overrides: str) -> Job:
    run, config = Run(overrides, ()), composed(*overrides)
    return Job(run, config, make_setting(run, config, CHOICES, other=[]))


@pytest.mark.parametrize(
    ("overrides", "name", "text"),
    [
        (["topology=base", "topology.options.k=2"], "label", "base(k=2)"),
        (["topology=base", "topology.options.k=1"], "label", "base"),
        (["topology=random_matching", "seed=1"], "label", "random_matching"),
        (["topology=ring", "topology.every=4"], "label", "ring, every 4 steps"),
        (["topology=ring", "topology.order=[0,2,1,3]"], "label", "ring, order [0, 2, 1, 3]"),
        (["topology=ring", "topology.warmup_rounds=9"], "label", "ring, after 9 all-reduces"),
        (["method=ddp"], "label", "all-reduce"),
        (["method=local"], "label", "no communication"),
        (["data.partition={scheme:iid}"], "partition", "iid"),
        (["data.partition={scheme:dirichlet}"], "partition", "dirichlet(0.5)"),
        (["data.partition={scheme:by_class,shards_per_rank:1}"], "partition", "by_class(1)"),
    ],
)
def test_job_label_and_partition(overrides: list[str], name: str, text: str) -> None:
    assert getattr(job(*overrides).setting, name) == text


def test_what_a_sweep_varies_for_all_reduce_too_is_the_condition_of_a_row() -> None:
    shared, own = ("model=cnn", "optimizer.lr=0.2"), ("topology=ring", "optimizer.momentum=0.5")
    run = Run((*shared, *own), (*shared, "method=ddp"))
    keys = ["model", "optimizer.lr", "optimizer.momentum"]
    setting = make_setting(run, composed(*run.overrides), CHOICES, keys)
    assert (setting.label, setting.condition) == ("ring, optimizer.momentum=0.5", "model=cnn, optimizer.lr=0.2")
    assert job("topology=ring").setting.condition is None
    own_data = make_setting(Run((r"data=my_module\:make",), (r"data=my_module\:make",)), composed(), CHOICES, ["data"])
    assert own_data.condition == "data=my_module:make"


def test_job_fingerprint_follows_what_is_computed() -> None:
    first = fingerprint(composed())
    same = ("output_root=elsewhere", "figures=false", "sweep.target=0.5", "cluster.latency_us=1", "launch.timeout_s=9")
    assert {fingerprint(composed(override)) for override in same} == {first}
    others = ("seed=1", "optimizer.lr=0.2", "launch.world_size=5", "training.epochs=3", "engine=virtual")
    assert len({first, *(fingerprint(composed(override)) for override in others)}) == 1 + len(others)


def test_job_is_finished_once_its_summary_says_so(tmp_path: Path) -> None:
    mine = job("topology=ring")
    assert not mine.is_finished(tmp_path)
    assert "without leaving summary.json" in mine.summary(tmp_path)["reason"]
    folder = tmp_path / mine.name
    claim(folder, mine.config)
    assert not mine.is_finished(tmp_path)
    write_failure(folder, {"status": "failed", "reason": "because"})
    assert not mine.is_finished(tmp_path)
    assert mine.summary(tmp_path)["reason"] == "because"
    write_json(folder / "summary.json", {"status": "completed", "reason": ""})
    assert mine.is_finished(tmp_path)
    assert not job("topology=ring", "seed=1").is_finished(tmp_path)


def test_job_that_failed_is_forgotten_but_not_while_it_runs(tmp_path: Path) -> None:
    mine = job("topology=ring")
    mine.forget(tmp_path)
    folder = tmp_path / mine.name
    claim(folder, mine.config)
    with lock(folder), pytest.raises(FolderError, match="is in use by"):
        mine.forget(tmp_path)
    mine.forget(tmp_path)
    assert not folder.exists()


# ---------------------------------------------------------------------- the folder of a sweep that no experiment names


BASE = ("topology=ring,base", "launch.world_size=8", "seed=0,1")


def folder(*arguments: str) -> str:
    (chosen,) = folder_option(arguments)
    return chosen


@pytest.mark.parametrize(
    ("is_same", "arguments"),
    [
        (True, ("launch.world_size=8", "seed=range(5)", "topology=ring,base")),
        (True, ("topology=ring,base,star", "launch.world_size=8")),
        (True, (*BASE, "hydra/launcher=basic", "hydra.launcher.n_jobs=1", "figures=true", "output_root=elsewhere")),
        (True, (*BASE, "sweep.target=0.9", "--multirun")),
        (False, ("topology=ring,base", "launch.world_size=16", "seed=0,1")),
        (False, (*BASE, "training.steps=10")),
        (False, (*BASE, "+data.noise=0.1")),
    ],
)
def test_folder_is_found_again_by_the_same_sweep_alone(is_same: bool, arguments: tuple[str, ...]) -> None:
    assert (folder(*arguments) == folder(*BASE)) == is_same


def test_folder_name_says_what_is_swept_and_what_is_set() -> None:
    assert folder(*BASE).startswith("hydra.sweep.dir=${output_root}/sweeps/world_size-8_topology_")
    assert folder().startswith("hydra.sweep.dir=${output_root}/sweeps/defaults_")


@pytest.mark.parametrize("argument", ["experiment=smoke", "hydra.sweep.dir=mine", "topology=[ring"])
def test_folder_is_not_chosen_where_the_command_line_does_or_cannot_be_read(argument: str) -> None:
    assert folder_option([*BASE, argument]) == []


COMPLETED = {"status": "completed", "reason": "", "averaged_test_accuracy": 0.975, "steps": 12}


def leave(folder: Path, summary: dict[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").touch()
    if summary is not None:
        write_json(folder / "summary.json", summary)


def test_sweep_table_gathers_all_runs_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "10", None)
    leave(tmp_path / "0" / "mlflow_artifacts", COMPLETED)  # a logger's copy is no run
    leave(tmp_path / "9", {"status": "failed", "reason": "because", "overrides": ["seed=1", "topology=ring"]})
    leave(tmp_path / "0", {**COMPLETED, "consensus_distance_before": None, "overrides": ["seed=0", "topology=ring"]})
    assert [(summary["job"], summary["status"]) for summary in finish_sweep(tmp_path)] == [
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

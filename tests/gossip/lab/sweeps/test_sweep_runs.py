"""Whole sweeps in this process: what is run, what is not run again, and what they leave."""

import csv
import json
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from gossip.lab.experiments import training
from gossip.lab.experiments.run_folder import claim
from gossip.lab.experiments.training_methods import VirtualMethod
from gossip.lab.sweeps.sweep_jobs import Job
from gossip.lab.sweeps.sweeper import GridSweeper

pytestmark = pytest.mark.slow

Sweep = Callable[..., int]

FOLDER = Path("outputs/sweeps/mine")
TINY = ("hydra/launcher=basic", "engine=virtual", "training.steps=2", "training.batch_size=4", "model.hidden=[4]")


@pytest.fixture
def sweep(main: Callable[..., int]) -> Sweep:
    """Run the command line in this process; its exit status."""

    def run(*arguments: str) -> int:
        try:
            return main("sweep", *TINY, f"hydra.sweep.dir={FOLDER}", *arguments)
        except SystemExit as ended:  # as sys.exit in a script
            return ended.code if isinstance(ended.code, int) else 1

    return run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The method or topology of each run that begins; one whose name is put into ``fails`` fails."""
    begun: list[str] = []

    class Noted(VirtualMethod):
        def __init__(self, experiment: Any, *rest: Any) -> None:
            topology = experiment.topology
            begun.append(experiment.settings.method if topology is None else topology.name)
            super().__init__(experiment, *rest)

    monkeypatch.setattr(training, "VirtualMethod", Noted)
    return begun


def results() -> dict[str, Any]:
    return json.loads((FOLDER / "results.json").read_text())


def statuses() -> dict[str, str]:
    return {row["label"]: row["status"] for row in results()["rows"]}


def test_sweep_runs_each_once_nothing_the_second_time_and_then_only_what_is_new(
    sweep: Sweep, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("topology=ring", "launch.world_size=3", "seed=0,1", "sweep.target=0.01")
    assert sweep(*command) == 0
    assert sorted(ran) == sorted(["ring", "ddp", "local"] * 2)
    first = results()
    assert first["title"] == "ring on 3 ranks: digits, iid"
    assert [row["label"] for row in first["rows"]] == ["ring", "all-reduce", "no communication"]
    ring = first["rows"][0]
    assert (ring["seeds"], ring["engine"], ring["world_size"]) == ([0, 1], "virtual", 3)
    assert ring["values"]["rounds_to_target"] == {"mean": 2.0, "spread": 0.0, "count": 2}
    assert ring["values"]["predicted_time_to_target_s"]["mean"] > 0
    assert (FOLDER / "report.html").exists()
    with (FOLDER / "sweep.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    assert "no communication" in capsys.readouterr().out

    ran.clear()
    assert sweep(*command) == 0
    assert ran == []
    assert results() == first

    assert sweep("topology=ring,complete", "launch.world_size=3") == 0
    assert ran == ["complete"]


def fail_all_reduce(patch: pytest.MonkeyPatch, tag: str = "") -> None:
    finish = training._finish

    def fail(experiment: Any, *rest: Any) -> dict[str, Any]:
        if experiment.settings.method == "ddp" and tag in rest[-1].name:
            raise ArithmeticError("injected")
        return finish(experiment, *rest)

    patch.setattr(training, "_finish", fail)


def test_sweep_records_a_failure_goes_on_and_tries_again(
    sweep: Sweep, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        fail_all_reduce(patch)
        assert sweep("method=ddp", "launch.world_size=2") == 1
    assert statuses() == {"all-reduce": "failed", "no communication": "completed"}
    assert results()["rows"][0]["reasons"] == ["seed 0: ArithmeticError: injected"]
    assert "all-reduce, 2 ranks, iid: failed: seed 0: ArithmeticError: injected" in capsys.readouterr().out
    ran.clear()
    assert sweep("method=ddp", "launch.world_size=2") == 0
    assert ran == ["ddp"]
    assert set(statuses().values()) == {"completed"}


TUNED = ("launch.world_size=2", "seed=0,1,2", "sweep.tune={parameter:optimizer.lr,values:[0.01,0.5],seed:0}")
COMPARED = (
    "topology=ring",
    "sweep.variants=['algorithm=adapt_then_combine','algorithm=quasi_global_momentum optimizer.momentum=0 "
    "optimizer.nesterov=false']",
)


def test_sweep_tunes_every_method_and_compares_pairs(sweep: Sweep, ran: list[str]) -> None:
    assert sweep(*TUNED, *COMPARED) == 0
    assert ran == (["ring"] * 4 + ["ddp", "local"] * 2) * 2  # 2 values with seed 0, then 2 seeds with the best of them
    document = results()
    rows = {row["algorithm"] or row["label"]: row for row in document["rows"]}
    assert list(rows) == ["adapt_then_combine", "quasi_global_momentum", "all-reduce", "no communication"]
    for row in rows.values():
        tuning = row["tuning"]
        assert row["seeds"] == [1, 2]
        assert [trial["value"] for trial in tuning["trials"]] == [0.01, 0.5]
        best = min(tuning["trials"], key=lambda trial: (-trial["accuracy"], trial["loss"]))
        assert (tuning["parameter"], tuning["seed"], tuning["value"]) == ("optimizer.lr", 0, best["value"])
        assert tuning["is_at_end"]
        assert all(command.endswith(f"optimizer.lr={tuning['value']}") for command in row["commands"])
    with (FOLDER / "sweep.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 4 * (2 + 2)

    def accuracies(*overrides: str) -> list[float]:
        fitting = [run for run in runs if set(overrides) <= set(run["overrides"].split()) and run["seed"] != "0"]
        return [float(run["averaged_test_accuracy"]) for run in sorted(fitting, key=lambda run: run["seed"])]

    gossip, ddp = accuracies("algorithm=quasi_global_momentum"), accuracies("method=ddp")
    difference = rows["quasi_global_momentum"]["values"]["average_difference"]
    assert difference["mean"] == pytest.approx(50 * (sum(gossip) - sum(ddp)))
    assert difference["mean"] != 0
    assert difference["count"] == 2
    assert "average_difference" not in rows["all-reduce"]["values"]
    settings = document["settings"]
    assert (settings["optimizer"], settings["optimizer.lr"]) == ("SGD", "0.5")
    assert "optimizer.momentum" not in settings  # it differs


def test_sweep_without_a_trial_that_went_well_runs_the_other_methods(
    sweep: Sweep, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_all_reduce(monkeypatch)
    assert sweep("method=ddp", *TUNED) == 1
    assert ran == ["ddp", "local"] * 2 + ["local"] * 2
    ddp, local = results()["rows"]
    assert (ddp["status"], ddp["num_failed"], ddp["tuning"]["value"]) == ("failed", 2, None)
    assert "no value of optimizer.lr could be chosen with seed 0: 0.01: ArithmeticError" in ddp["reasons"][0]
    assert (local["status"], local["values"]["loss_ratio"]) == ("completed", None)


def test_sweep_has_not_failed_where_a_value_of_the_grid_has(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_all_reduce(monkeypatch, "optimizer.lr-0.5_")
    assert sweep("method=ddp", *TUNED) == 0
    assert results()["rows"][0]["tuning"]["value"] == 0.01


def test_sweep_begins_runs_again_that_went_with_a_killed_process(
    sweep: Sweep, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = GridSweeper._launch
    sizes = []

    def killed_at_ring(self: GridSweeper, jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))
        for job in jobs:
            if job.setting.topology == "ring":
                claim(FOLDER / job.name, job.config)
                raise BrokenProcessPool("killed")
            launch(self, [job])

    with monkeypatch.context() as patch:
        patch.setattr(GridSweeper, "_launch", killed_at_ring)
        assert sweep("topology=ring,star", "launch.world_size=2") == 1
    assert sizes == [4, 1, 3]
    assert ran == ["star", "ddp", "local"]
    row = results()["rows"][0]
    assert (row["label"], row["reasons"]) == ("ring", ["seed 0: its process ended without leaving summary.json"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["topology=ring,star", "optimizr.lr=1"],
            "error: the configuration has no key optimizr.lr; did you mean optimizer.lr?",
        ),
        (["cluster.local_size=3"], "error: launch.world_size=4 ranks do not fill nodes of cluster.local_size=3"),
        (["cluster.latency_us=-1"], "error: cluster.latency_us=-1: latency_us must be"),
        (["optimizer.lr=interval(0,1)"], "error: optimizer.lr=interval(0,1) is no list of values"),
    ],
)
def test_sweep_that_cannot_be_is_one_line(
    sweep: Sweep, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert sweep(*arguments) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(line)
    assert "Traceback" not in error

"""Which value of the grid each setting takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.lab.report.report_document import Choice, Metric, Setting
from gossip.lab.sweeps.sweep_jobs import Job, Run, expand
from gossip.lab.sweeps.sweeper import Tuning, read_tuning

ACCURACY, LOSS = Metric(metric="accuracy", target=None), Metric(metric="loss", target=None)
TUNING = Tuning(parameter="optimizer.lr", values=(0.1, 0.2, 0.4), seed=0)
AXES = {"topology": ["topology=ring"], "seed": ["seed=0", "seed=1", "seed=2"]}
SETTING = Setting(label="ring", method="gossip", topology="ring", world_size=4, partition="iid", engine="virtual")


def chosen(folder: Path, metric: Metric, *trials: tuple[float, float | None] | str) -> Choice:
    """After a trial for each value of the grid: accuracy and loss, or the reason why it failed."""
    jobs = []
    for value, trial in zip(TUNING.values, trials, strict=True):
        run = Run(("topology=ring", "seed=0", f"optimizer.lr={value}"), ())
        config: dict[str, Any] = {"seed": 0, "optimizer": {"lr": value}, "launch": {"world_size": 4}}
        job = Job(run, config, SETTING, None)
        summary: dict[str, Any] = {"status": "failed", "reason": trial}
        if not isinstance(trial, str):
            summary = {"status": "completed", "averaged_test_accuracy": trial[0], "averaged_test_loss": trial[1]}
        (folder / job.name).mkdir(parents=True)
        (folder / job.name / "summary.json").write_text(json.dumps(summary))
        jobs.append(job)
    choose = TUNING.choose(jobs, folder, metric)
    choice = choose(Run(("topology=ring", "seed=2"), ()))
    assert choice is not None
    assert choose(Run(("topology=star", "seed=2"), ())) is None
    return choice


def test_trials_take_every_value_with_one_seed_and_the_compared_runs_the_other_seeds() -> None:
    trials = expand(TUNING.trial_axes(AXES))
    assert [run.overrides for run in trials if "topology=ring" in run.overrides] == [
        ("topology=ring", "seed=0", f"optimizer.lr={value}") for value in TUNING.values
    ]
    assert len(trials) == 3 * 3  # the baselines have as many
    assert {run.overrides for run in expand(TUNING.compared_axes(AXES)) if "topology=ring" in run.overrides} == {
        ("topology=ring", "seed=1"),
        ("topology=ring", "seed=2"),
    }


@pytest.mark.parametrize(
    ("metric", "trials", "value", "is_at_end"),
    [
        (ACCURACY, [(0.8, 0.1), (0.9, 0.5), (0.7, 0.2)], 0.2, False),
        (LOSS, [(0.8, 0.3), (0.9, 0.5), (0.7, 0.2)], 0.4, True),
        (ACCURACY, [(0.9, 0.3), (0.9, 0.2), (0.7, 0.1)], 0.2, False),
        (ACCURACY, [(0.5, 0.9), (0.99, None), "because"], 0.1, True),
    ],
    ids=["most accurate", "lowest loss", "equally accurate", "diverged or failed"],
)
def test_choice_is_the_best(tmp_path: Path, metric: Metric, trials: list[Any], value: float, is_at_end: bool) -> None:
    choice = chosen(tmp_path, metric, *trials)
    assert (choice.value, choice.is_at_end) == (value, is_at_end)
    job = Job(Run(("topology=ring", "seed=1"), ()), {}, SETTING, choice)
    assert (job.overrides, job.problem) == (("topology=ring", "seed=1", f"optimizer.lr={value}"), "")


def test_choice_is_none_where_no_trial_went_well(tmp_path: Path) -> None:
    choice = chosen(tmp_path, ACCURACY, "because", (0.1, None), "because")
    job = Job(Run(("topology=ring", "seed=1"), ()), {"seed": 1, "launch": {"world_size": 4}}, SETTING, choice)
    assert (job.summary(tmp_path)["status"], job.summary(tmp_path)["reason"]) == (
        "failed",
        "no value of optimizer.lr could be chosen with seed 0: 0.1: because; 0.2: its loss is not finite; 0.4: because",
    )
    assert job.overrides == ("topology=ring", "seed=1")


def config(**tune: Any) -> dict[str, Any]:
    whole = {"parameter": "optimizer.lr", "values": [0.1, 0.2], "seed": 0, **tune}
    return {"seed": 0, "optimizer": {"lr": 0.1}, "algorithm": {"gamma": 1.0}, "sweep": {"tune": whole}}


def test_tuning_is_read() -> None:
    assert read_tuning({"sweep": {"tune": None}}, AXES) is None
    read_as = read_tuning(config(values=[1, 0.2], seed=7), AXES)
    assert read_as is not None
    assert read_as.trial_axes(AXES)["optimizer.lr"] == ["optimizer.lr=1", "optimizer.lr=0.2"]  # as they were written


@pytest.mark.parametrize(
    ("tune", "axes", "message"),
    [
        ({"parameter": "optimizer.rl"}, {}, r"sweep\.tune\.parameter=optimizer\.rl: the configuration has no key"),
        ({"parameter": "algorithm.gamma"}, {}, r"sweep\.tune\.parameter=algorithm\.gamma means nothing to all-reduce"),
        ({}, {"optimizer.lr": ["optimizer.lr=0.3"]}, r"sweep\.tune\.parameter=optimizer\.lr is set besides"),
        ({}, {"seed": ["seed=0"]}, r"sweep\.tune\.seed=0: no other seed is left to compare with"),
    ],
)
def test_tuning_that_cannot_be_is_refused(tune: dict[str, Any], axes: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_tuning(config(**tune), {**AXES, **axes})

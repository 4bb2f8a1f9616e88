"""Curves of runs, and rows over seeds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composing import composed

from gossip.lab.experiments.records import JsonlWriter
from gossip.lab.experiments.run_folder import write_json
from gossip.lab.report.report_document import Metric, Value
from gossip.lab.report.report_page import COLUMNS
from gossip.lab.sweeps import sweep_document
from gossip.lab.sweeps.sweep_document import Point, make_rows, mean_curve, read_curve, steps_to_target
from gossip.lab.sweeps.sweep_jobs import Job, Run, make_setting

ACCURACY = Metric(metric="accuracy", target=0.9)
SPLIT = "data.partition={scheme:dirichlet,alpha:0.1}"
CHOICES = {"algorithm": "adapt_while_communicating", "compression": "none"}


def point(step: int, accuracy: float | None, loss: float | None = None, consensus: float | None = 0.5) -> Point:
    absolute = None if consensus is None else 10 * consensus
    measured = {"accuracy": accuracy, "loss": loss, "consensus": consensus, "consensus_absolute": absolute}
    return {"step": step, "bytes": 100.0 * step, **measured}


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Write the files of a run whose step takes half a second, with an evaluation every ten steps of 100 bytes."""
    monkeypatch.setattr(sweep_document, "predict_step_time_s", lambda *_: 0.5)

    def write(seed: int, accuracies: list[float], *, status: str = "completed", method: str = "gossip") -> Job:
        overrides = (f"method={method}", SPLIT, f"seed={seed}")
        run = Run(overrides, ("method=ddp", SPLIT, f"seed={seed}"))
        config = composed(*overrides)
        job = Job(run, config, make_setting(run, config, CHOICES, other=[]))
        summary: dict[str, Any] = {"status": status, "reason": "because", "steps": 10 * len(accuracies)}
        accuracy = accuracies[-1] if accuracies else None
        losses = ("averaged_test_loss", "local_test_loss_worst")
        summary |= {"averaged_test_accuracy": accuracy, "local_test_accuracy_worst": accuracy}
        with JsonlWriter(tmp_path / job.name / "workers.jsonl") as writer:
            for number, accuracy in enumerate(accuracies):
                measured = {"averaged_test_accuracy": accuracy, "averaged_test_loss": 0.5}
                writer.write({"step": 10 * number + 9, "bytes_sent": 1000, **measured})
        write_json(tmp_path / job.name / "summary.json", summary | dict.fromkeys(losses, 0.5))
        return job

    return write


def test_curve_adds_up_bytes_over_steps_as_the_mean_of_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        with JsonlWriter(tmp_path / f"rank{rank}.jsonl") as writer:
            for step in range(4 - 2 * rank):  # the second one is lost
                measured = {"consensus_distance_relative": 0.25, "consensus_distance": 3.0} if step % 2 else {}
                if step == 3:
                    measured |= {"averaged_test_loss": float("nan"), "averaged_test_accuracy": 0.75}
                writer.write({"step": step, "bytes_sent": 100 + 100 * rank, **measured})
    assert read_curve(tmp_path) == [
        {**point(2, None, consensus=0.25), "bytes": 300.0, "consensus_absolute": 3.0},
        {**point(4, 0.75, consensus=0.25), "bytes": 500.0, "consensus_absolute": 3.0},
    ]


def test_target_is_reached_at_the_first_point_that_is_as_good() -> None:
    curve = [point(1, None), point(2, 0.89, 2.0), point(3, 0.9, 1.5), point(4, 0.95, 1.0)]
    assert steps_to_target(curve, ACCURACY) == curve[2]
    assert steps_to_target(curve, Metric(metric="accuracy", target=0.96)) is None
    assert steps_to_target(curve, Metric(metric="accuracy", target=None)) is None
    assert steps_to_target(curve, Metric(metric="loss", target=1.5)) == curve[2]


def test_mean_curve_has_the_steps_that_all_runs_have() -> None:
    curves = [[point(1, 0.5), point(2, 0.5), point(3, None)], [point(1, 0.7), point(3, 0.9)]]
    found = mean_curve(curves, ACCURACY, 0.5)
    assert (found.named("metric_low"), found.named("metric_high")) == ((0.5, None), (0.7, None))
    assert {name: curve for name, curve in found.model_dump().items() if not name.endswith(("_low", "_high"))} == {
        "step": (1, 3),
        "bytes": (100.0, 300.0),
        "time_s": (0.5, 1.5),
        "metric": (pytest.approx(0.6), None),
        "loss": (None, None),
        "consensus": (0.5, 0.5),
        "consensus_absolute": (5.0, 5.0),
    }
    of_one = mean_curve(curves[:1], Metric(metric="loss", target=None), 0.5)
    names = {"step", "bytes", "time_s", "metric", "accuracy", "consensus", "consensus_absolute"}
    assert of_one.model_dump().keys() == names


def test_rows_put_seeds_together(result: Callable[..., Job], tmp_path: Path) -> None:
    results = [result(0, [0.8, 0.92]), result(0, [0.95], method="ddp"), result(1, [0.91, 0.94])]
    gossip, ddp = make_rows(results, tmp_path, ACCURACY)
    assert (gossip.label, gossip.seeds, gossip.num_failed) == ("one_peer_exponential", (0, 1), 0)
    assert (ddp.label, ddp.seeds, ddp.topology) == ("all-reduce", (0,), None)
    assert gossip.mean("averaged_accuracy") == pytest.approx(0.93)
    assert gossip.values["rounds_to_target"] == Value(mean=15.0, spread=50**0.5, count=2)
    assert gossip.mean("bytes_to_target") == 1500.0
    assert gossip.mean("predicted_time_to_target_s") == 7.5
    assert gossip.mean("predicted_total_time_s") == 10.0
    assert gossip.mean("local_accuracy_mean") is None
    assert gossip.values.keys() <= {column.name for column in COLUMNS}
    assert gossip.commands == tuple(f"gossip train method=gossip '{SPLIT}' seed={seed}" for seed in (0, 1))
    assert gossip.curves is not None
    assert gossip.curves.metric == (pytest.approx(0.855), pytest.approx(0.93))


def test_rows_name_the_seeds_that_failed(result: Callable[..., Job], tmp_path: Path) -> None:
    results = [result(0, [0.95]), result(1, [], status="failed"), result(0, [], status="failed", method="local")]
    partly, failed = make_rows(results, tmp_path, ACCURACY)
    assert (partly.status, partly.num_failed, partly.reasons) == ("partly failed", 1, ("seed 1: because",))
    assert partly.values["averaged_accuracy"] == Value(mean=0.95, count=1)
    assert (failed.status, failed.values, failed.curves) == ("failed", {}, None)


def test_rows_are_compared_seed_by_seed_with_all_reduce_where_both_have_ended_well(
    result: Callable[..., Job], tmp_path: Path
) -> None:
    accuracies = {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.6}
    of_all_reduce = [result(seed, [value], method="ddp") for seed, value in ((1, 0.9), (0, 0.92))]
    of_all_reduce.append(result(2, [], status="failed", method="ddp"))
    gossip, all_reduce = make_rows(
        [*(result(seed, [value]) for seed, value in accuracies.items()), *of_all_reduce], tmp_path, ACCURACY
    )
    difference = gossip.values["average_difference"]
    assert difference is not None
    assert (difference.mean, difference.count) == (pytest.approx(-6.0), 2)  # seed 2 failed there, seed 3 is none there
    assert "average_difference" not in all_reduce.values
    alone, _ = make_rows([result(2, [0.7]), result(2, [], status="failed", method="ddp")], tmp_path, ACCURACY)
    assert alone.values["average_difference"] is None

"""The rows of the result of a sweep: runs that differ only in their seed are aggregated to mean and spread."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossip.lab.report.report_document import Setting
from gossip.lab.sweeps.sweep_curves import Metric, Point, mean_curve, steps_to_target
from gossip.lab.sweeps.sweep_grid import REFERENCE
from gossip.lab.sweeps.sweep_jobs import Job
from gossip.lab.sweeps.sweep_pairs import aggregate, differences, judge, read_bars

_FROM_SUMMARY = {
    "averaged_accuracy": "averaged_test_accuracy",
    "averaged_loss": "averaged_test_loss",
    "local_accuracy_mean": "local_test_accuracy_mean",
    "local_accuracy_worst": "local_test_accuracy_worst",
    "local_loss_mean": "local_test_loss_mean",
    "local_loss_worst": "local_test_loss_worst",
    "consensus_distance": "consensus_distance_before",
    "consensus_distance_relative": "consensus_distance_before_relative",
    "bytes_per_step": "bytes_sent_per_step",
    "steps": "steps",
    "training_time_s": "training_time_s",
}
"""The values of a row, and their keys in the summary of a run."""


@dataclass(frozen=True)
class Result:
    """A run with its summary, its curve and the predicted time per step; the latter are empty and None if it failed."""

    job: Job
    summary: Mapping[str, Any]
    curve: Sequence[Point]
    step_time_s: float | None

    @property
    def is_completed(self) -> bool:
        """Whether the run has been completed."""
        return bool(self.summary["status"] == "completed")


def make_rows(results: Sequence[Result], metric: Metric) -> list[dict[str, Any]]:
    """Build one row per setting, in order of appearance; the seeds of a setting are aggregated.

    Each run is compared with the all-reduce run of the same seed, ranks and data, if both have completed.
    """
    by_setting: dict[Setting, list[Result]] = {}
    for result in results:
        by_setting.setdefault(result.job.setting, []).append(result)
    summaries = {result.job.run.overrides: result.summary for result in results if result.is_completed}
    return [_row(setting, of_setting, summaries, metric) for setting, of_setting in by_setting.items()]


def _row(
    setting: Setting,
    results: Sequence[Result],
    summaries: Mapping[tuple[str, ...], Mapping[str, Any]],
    metric: Metric,
) -> dict[str, Any]:
    completed = [result for result in results if result.is_completed]
    failed = [result for result in results if not result.is_completed]
    step_time_s = completed[0].step_time_s if completed else None
    by_run = [_values(result, metric) for result in completed]
    values = {name: aggregate([of_run[name] for of_run in by_run]) for name in by_run[0]} if by_run else {}
    if completed and setting.method != REFERENCE:
        references = ((result, summaries.get(result.job.run.reference)) for result in completed)
        pairs = [(result.summary, reference) for result, reference in references if reference is not None]
        values |= differences(pairs, metric.name)
    job = results[0].job
    return {
        **setting.model_dump(),
        "seeds": [result.job.seed for result in results],
        "num_failed": len(failed),
        "status": "completed" if not failed else "partly failed" if completed else "failed",
        "reasons": [f"seed {result.job.seed}: {result.summary['reason']}" for result in failed],
        "commands": [f"gossip train {shlex.join(result.job.overrides)}" for result in results],
        "values": values,
        "bars": judge(read_bars(job.config), values) if setting.method == "gossip" else {},
        "tuning": None if job.choice is None else job.choice.model_dump(),
        "curves": mean_curve([result.curve for result in completed], metric, step_time_s),
    }


def _values(result: Result, metric: Metric) -> dict[str, float | None]:
    """Return the values that one run contributes to its row."""
    assert result.step_time_s is not None
    reached = steps_to_target(result.curve, metric)
    return {
        **{name: result.summary.get(key) for name, key in _FROM_SUMMARY.items()},
        "rounds_to_target": None if reached is None else reached.step,
        "bytes_to_target": None if reached is None else reached.bytes_sent,
        "predicted_step_time_s": result.step_time_s,
        "predicted_time_to_target_s": None if reached is None else reached.step * result.step_time_s,
        "predicted_total_time_s": result.summary["steps"] * result.step_time_s,
    }

"""The rows of the result of a sweep: runs that differ only in their seed are aggregated to mean and spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gossip.lab.sweeps.sweep_curves import Metric, Point, mean_curve, steps_to_target
from gossip.lab.sweeps.sweep_grid import REFERENCE
from gossip.lab.sweeps.sweep_jobs import Job, Setting
from gossip.lab.sweeps.sweep_pairs import differences, judge, read_bars

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
    """A run and its results.

    Attributes
    ----------
    job : Job
        The run.
    summary : mapping
        The summary of the run, with its ``status``, and the ``reason`` if it failed.
    curve : sequence of Point
        The curve of the run; empty if it failed.
    step_time_s : float or None
        The predicted time per step on the cluster, mean over the simulated steps; None if the run failed.
    """

    job: Job
    summary: Mapping[str, Any]
    curve: Sequence[Point]
    step_time_s: float | None


def make_rows(results: Sequence[Result], metric: Metric) -> list[dict[str, Any]]:
    """Build one row per setting, in order of appearance; the seeds of a setting are aggregated.

    Each run is compared with the all-reduce run of the same seed, ranks and data, if both have completed.
    """
    by_setting: dict[Setting, list[Result]] = {}
    for result in results:
        by_setting.setdefault(result.job.setting, []).append(result)
    summaries = {result.job.run.overrides: result.summary for result in results if _is_completed(result)}
    return [_row(setting, of_setting, summaries, metric) for setting, of_setting in by_setting.items()]


def aggregate(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean, sample standard deviation (None for one value) and count; None if a value is missing.

    A mean over only those seeds that reached the target would make a bad setting look good.
    """
    present = [value for value in values if value is not None]
    if not present or len(present) < len(values):
        return None
    spread = statistics.stdev(present) if len(present) > 1 else None
    return {"mean": statistics.fmean(present), "spread": spread, "count": len(present)}


def _is_completed(result: Result) -> bool:
    return bool(result.summary["status"] == "completed")


def _row(
    setting: Setting,
    results: Sequence[Result],
    summaries: Mapping[tuple[str, ...], Mapping[str, Any]],
    metric: Metric,
) -> dict[str, Any]:
    completed = [result for result in results if _is_completed(result)]
    failed = [result for result in results if not _is_completed(result)]
    by_run = [_values(result, metric) for result in completed]
    values = {name: aggregate([of_run[name] for of_run in by_run]) for name in by_run[0]} if by_run else {}
    if completed and setting.method != REFERENCE:
        references = ((result, summaries.get(result.job.run.reference)) for result in completed)
        pairs = [(result.summary, reference) for result, reference in references if reference is not None]
        values |= differences(pairs, metric.name)
    job = results[0].job
    choice = job.choice
    step_times = [result.step_time_s for result in completed]
    step_time_s = None if None in step_times or not step_times else step_times[0]
    return {
        **asdict(setting),
        "seeds": [result.job.seed for result in results],
        "num_failed": len(failed),
        "status": "completed" if not failed else "partly failed" if completed else "failed",
        "reasons": [f"seed {result.job.seed}: {result.summary['reason']}" for result in failed],
        "commands": [result.job.command for result in results],
        "values": values,
        "bars": judge(read_bars(job.config), values) if setting.method == "gossip" else {},
        "tuning": None if choice is None else {**asdict(choice), "is_at_end": choice.is_at_end},
        "curves": mean_curve([result.curve for result in completed], metric, step_time_s),
    }


def _values(result: Result, metric: Metric) -> dict[str, float | None]:
    """Return the values that one run contributes to its row."""
    values: dict[str, float | None] = {name: result.summary.get(key) for name, key in _FROM_SUMMARY.items()}
    reached = steps_to_target(result.curve, metric)
    step_time_s = result.step_time_s
    values["rounds_to_target"] = None if reached is None else reached.step
    values["bytes_to_target"] = None if reached is None else reached.bytes_sent
    values["predicted_step_time_s"] = step_time_s
    values["predicted_time_to_target_s"] = (
        None if reached is None or step_time_s is None else reached.step * step_time_s
    )
    values["predicted_total_time_s"] = None if step_time_s is None else result.summary["steps"] * step_time_s
    return values

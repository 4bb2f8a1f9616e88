"""The curves of a run, from its records: averaged model and consensus distance over steps and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from gossip.lab.experiments.records import read_jsonl, record_files
from gossip.lab.experiments.validated_models import Model


class Metric(Model):
    """The metric of the averaged model by which runs are compared, and the target, from the section ``sweep``."""

    model_config = ConfigDict(extra="ignore")

    name: Literal["accuracy", "loss"] = Field(alias="metric")
    target: float | None

    @property
    def higher_is_better(self) -> bool:
        """Whether the higher of two values is the better one."""
        return self.name == "accuracy"


@dataclass(frozen=True)
class Point:
    """A point of a curve: the measurements after ``step`` steps; None if not measured, or not finite.

    The bytes are those sent per rank so far, mean over the ranks; accuracy and loss are those of the averaged model;
    the consensus distance is relative to the mean, or absolute.
    """

    step: int
    bytes_sent: float
    accuracy: float | None
    loss: float | None
    consensus: float | None
    consensus_absolute: float | None = None

    def metric(self, metric: Metric) -> float | None:
        """Return the value of the metric at this point."""
        return self.accuracy if metric.name == "accuracy" else self.loss


def read_curve(folder: Path, world_size: int) -> list[Point]:
    """Read the points of a run, in step order, from the records in its folder."""
    by_rank = [read_jsonl(path) for path in record_files(folder, world_size)]
    points: list[Point] = []
    sent = 0.0
    for records in zip(*by_rank, strict=True):
        sent += statistics.fmean(record.get("bytes_sent", 0) for record in records)
        first = records[0]
        if "averaged_test_loss" in first or "consensus_distance_relative" in first:
            names = (
                "averaged_test_accuracy",
                "averaged_test_loss",
                "consensus_distance_relative",
                "consensus_distance",
            )
            points.append(Point(first["step"] + 1, sent, *map(first.get, names)))
    return points


def steps_to_target(points: Sequence[Point], metric: Metric) -> Point | None:
    """Return the first measured point that reaches the target of the metric; None if there is none, or no target."""
    for point in points:
        value = point.metric(metric)
        if value is None or metric.target is None:
            continue
        if value >= metric.target if metric.higher_is_better else value <= metric.target:
            return point
    return None


def mean_curve(curves: Sequence[Sequence[Point]], metric: Metric, step_time_s: float | None) -> dict[str, Any] | None:
    """Average curves of runs that differ in their seed, as lists of equal length; None without any run.

    They are averaged at the steps that all of them have. A measurement that one run lacks is None: a mean over fewer
    runs would make the curve jump.
    """
    by_step = [{point.step: point for point in curve} for curve in curves]
    if not by_step:
        return None
    steps = sorted(set.intersection(*(set(points) for points in by_step)))
    columns = [[points[step] for points in by_step] for step in steps]
    return {
        "step": steps,
        "bytes": [_mean([point.bytes_sent for point in column]) for column in columns],
        "time_s": [None if step_time_s is None else step * step_time_s for step in steps],
        "metric": [_mean([point.metric(metric) for point in column]) for column in columns],
        "consensus": [_mean([point.consensus for point in column]) for column in columns],
        "consensus_absolute": [_mean([point.consensus_absolute for point in column]) for column in columns],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if len(present) == len(values) else None

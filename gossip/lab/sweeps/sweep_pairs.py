"""Paired comparison of runs with all-reduce, seed by seed: the mean with its 95 % interval, checked against bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossip.lab.experiments.validated_models import ConfigurationError, Model, read, value_of
from gossip.lab.report.report_document import FEWEST_SEEDS, Bar, Value

Summary = Mapping[str, Any]


class _Bars(Model):
    """The section ``sweep.bars``: ratios and, only where the metric is the accuracy, percentage points."""

    loss_ratio: float | None = None
    worst_loss_ratio: float | None = None
    average: float | None = None
    worst: float | None = None


_AT_LEAST = {"average": "average_difference", "worst": "worst_difference"}
"""The lower bars (acceptance thresholds), and the values to which they apply; upper ones apply to their namesakes."""

_ROUNDING = 1e-9
"""The tolerance for rounding errors within which a mean that equals a bar meets it."""


def differences(pairs: Sequence[tuple[Summary, Summary]], metric: str) -> dict[str, Value | None]:
    """Compare a setting with the final model of all-reduce on the test split.

    The pairs are the summaries of completed runs: one of the setting, and one of all-reduce with the same seed, ranks
    and data. The result has ``loss_ratio`` of the averaged model and ``worst_loss_ratio`` of the worst local replica
    and, if the metric is accuracy, ``average_difference`` and ``worst_difference`` in percentage points, negative where
    all-reduce is more accurate. Each value has an interval, as of :func:`aggregate`.
    """
    compared = {"average_difference": "averaged_test_accuracy", "worst_difference": "local_test_accuracy_worst"}
    compared = compared if metric == "accuracy" else {}
    compared |= {"loss_ratio": "averaged_test_loss", "worst_loss_ratio": "local_test_loss_worst"}
    return {
        name: aggregate([_compared(key, run, other) for run, other in pairs], with_interval=True)
        for name, key in compared.items()
    }


def aggregate(values: Sequence[float | None], *, with_interval: bool = False) -> Value | None:
    """Return mean, sample standard deviation (None for one value) and count; None if a value is missing.

    A mean over only those seeds that reached the target would make a bad setting look good. The 95 % confidence
    interval is Student's t, mean ± t(0.975, n - 1) · spread / sqrt(n), and None for fewer than three values.
    """
    present = [value for value in values if value is not None]
    if not present or len(present) < len(values):
        return None
    mean, count = statistics.fmean(present), len(present)
    spread = statistics.stdev(present) if count > 1 else None
    if not with_interval or count < FEWEST_SEEDS or spread is None:
        return Value(mean=mean, spread=spread, count=count)
    from scipy.stats import t

    reach = float(t.ppf(0.975, count - 1)) * spread / math.sqrt(count)
    return Value(mean=mean, spread=spread, count=count, interval=(mean - reach, mean + reach))


def read_bars(config: Mapping[str, Any]) -> dict[str, float]:
    """Read the thresholds in ``sweep.bars`` that a setting must reach; empty if it is null."""
    bars, metric = value_of(config, "sweep.bars"), value_of(config, "sweep.metric")
    if bars is None:
        return {}
    if metric != "accuracy" and isinstance(bars, Mapping) and (of_accuracy := _AT_LEAST.keys() & bars):
        raise ConfigurationError(
            f"sweep.bars.{min(of_accuracy)} is a bar of sweep.metric=accuracy, not of sweep.metric={metric}; there are "
            f"{' and '.join(name for name in _Bars.model_fields if name not in _AT_LEAST)}"
        )
    return read(_Bars, bars, "sweep.bars").model_dump(exclude_none=True)


def judge(bars: Mapping[str, float], values: Mapping[str, Value | None]) -> dict[str, Bar]:
    """Return, for each bar, whether the mean has met it; None if there is no mean."""
    judged = {}
    for name, bar in bars.items():
        value = values.get(_AT_LEAST.get(name, name))
        sign = 1 if name in _AT_LEAST else -1
        judged[name] = Bar(bar=bar, met=None if value is None else sign * (value.mean - bar) >= -_ROUNDING)
    return judged


def _compared(key: str, run: Summary, reference: Summary) -> float | None:
    is_loss = "loss" in key
    value: float | None = run[key]
    other: float | None = reference["averaged_test_loss" if is_loss else "averaged_test_accuracy"]
    if value is None or other is None or (is_loss and not other):
        return None
    return value / other if is_loss else 100 * (value - other)

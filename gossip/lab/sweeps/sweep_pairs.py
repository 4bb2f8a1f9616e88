"""Paired comparison of runs with all-reduce, seed by seed: the mean with its 95 % interval, checked against bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossip.lab.experiments.validated_models import ConfigurationError, Model, read, value_of

Summary = Mapping[str, Any]


class _LossBars(Model):
    """The section ``sweep.bars`` where the metric is the loss."""

    loss_ratio: float | None = None
    worst_loss_ratio: float | None = None


class _Bars(_LossBars):
    """The section where it is the accuracy."""

    average: float | None = None
    worst: float | None = None


AT_LEAST = {"average": "average_difference", "worst": "worst_difference"}
AT_MOST = {"loss_ratio": "loss_ratio", "worst_loss_ratio": "worst_loss_ratio"}
"""The lower and the upper bars (acceptance thresholds), and the values to which they apply."""

_CONFIDENCE = 0.95
_ROUNDING = 1e-9
"""The tolerance for rounding errors within which a mean that equals a bar meets it."""


def differences(pairs: Sequence[tuple[Summary, Summary]], metric: str) -> dict[str, dict[str, Any] | None]:
    """Compare a setting with the final model of all-reduce on the test split.

    Parameters
    ----------
    pairs : sequence of (mapping, mapping)
        The summaries of completed runs: one of the setting, and one of all-reduce with the same seed, ranks and data.
    metric : str
        "accuracy" or "loss".

    Returns
    -------
    dict
        ``loss_ratio`` of the averaged model and ``worst_loss_ratio`` of the worst local replica and, if the metric is
        accuracy, ``average_difference`` and ``worst_difference`` in percentage points, positive where all-reduce is
        less accurate. Each value is a result of :func:`with_interval`.
    """
    of_pairs: dict[str, list[float | None]] = {}
    if metric == "accuracy":
        of_pairs["average_difference"] = [_points(run["averaged_test_accuracy"], other) for run, other in pairs]
        of_pairs["worst_difference"] = [_points(run["local_test_accuracy_worst"], other) for run, other in pairs]
    of_pairs["loss_ratio"] = [_ratio(run["averaged_test_loss"], other) for run, other in pairs]
    of_pairs["worst_loss_ratio"] = [_ratio(run["local_test_loss_worst"], other) for run, other in pairs]
    return {name: with_interval(values) for name, values in of_pairs.items()}


def with_interval(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean, sample standard deviation, count and 95 % interval; None if there is no value or one is missing.

    The confidence interval is Student's t, mean ± t(0.975, n - 1) · spread / sqrt(n), and None for a single value.
    """
    present = [value for value in values if value is not None]
    if not present or len(present) < len(values):
        return None
    mean = statistics.fmean(present)
    if len(present) == 1:
        return {"mean": mean, "spread": None, "count": 1, "interval": None}
    from scipy.stats import t

    spread = statistics.stdev(present)
    reach = float(t.ppf((1 + _CONFIDENCE) / 2, len(present) - 1)) * spread / math.sqrt(len(present))
    return {"mean": mean, "spread": spread, "count": len(present), "interval": [mean - reach, mean + reach]}


def read_bars(config: Mapping[str, Any]) -> dict[str, float]:
    """Read the thresholds in ``sweep.bars`` that a setting must reach; empty if it is null.

    Raises
    ------
    ConfigurationError
        A bar does not exist for the metric, or is not a finite number.
    """
    bars, metric = value_of(config, "sweep.bars"), value_of(config, "sweep.metric")
    if bars is None:
        return {}
    if metric != "accuracy" and isinstance(bars, Mapping) and (of_accuracy := AT_LEAST.keys() & bars):
        raise ConfigurationError(
            f"sweep.bars.{min(of_accuracy)} is a bar of sweep.metric=accuracy, not of sweep.metric={metric}; there are "
            f"{' and '.join(AT_MOST)}"
        )
    return read(_Bars if metric == "accuracy" else _LossBars, bars, "sweep.bars").model_dump(exclude_none=True)


def judge(bars: Mapping[str, float], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, for each bar, its value ``bar`` and whether the mean has ``met`` it; None if there is no mean."""
    return {name: {"bar": bar, "met": _is_met(name, bar, values)} for name, bar in bars.items()}


def _is_met(name: str, bar: float, values: Mapping[str, Any]) -> bool | None:
    value = values.get(AT_LEAST.get(name) or AT_MOST[name])
    if value is None:
        return None
    return bool(value["mean"] >= bar - _ROUNDING if name in AT_LEAST else value["mean"] <= bar + _ROUNDING)


def _points(accuracy: float | None, reference: Summary) -> float | None:
    other = reference["averaged_test_accuracy"]
    return None if accuracy is None or other is None else 100 * (accuracy - other)


def _ratio(loss: float | None, reference: Summary) -> float | None:
    other = reference["averaged_test_loss"]
    return loss / other if loss is not None and other else None

"""Paired comparison of runs with all-reduce, seed by seed: the mean with its 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossip.lab.report.report_document import FEWEST_SEEDS, Value

Summary = Mapping[str, Any]


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


def _compared(key: str, run: Summary, reference: Summary) -> float | None:
    is_loss = "loss" in key
    value: float | None = run[key]
    other: float | None = reference["averaged_test_loss" if is_loss else "averaged_test_accuracy"]
    if value is None or other is None or (is_loss and not other):
        return None
    return value / other if is_loss else 100 * (value - other)

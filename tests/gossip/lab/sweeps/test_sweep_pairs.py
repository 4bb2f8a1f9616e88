"""Differences from all-reduce: means over pairs, and their intervals."""

from typing import Any

import numpy as np
import pytest

from gossip.lab.sweeps.sweep_document import aggregate, differences

ACCURACIES = [0.95, 0.97, 0.94, 0.99, 0.96]
REFERENCES = [0.96, 0.965, 0.955, 0.985, 0.98]


def summary(accuracy: float, loss: float | None, worst: float = 0.9, worst_loss: float | None = 1.0) -> dict[str, Any]:
    return {
        "averaged_test_accuracy": accuracy,
        "averaged_test_loss": loss,
        "local_test_accuracy_worst": worst,
        "local_test_loss_worst": worst_loss,
    }


def pairs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The worst replica of all-reduce is none that anything is compared with."""
    return [
        (summary(accuracy, 1 - accuracy, accuracy - 0.02, 1.1 - accuracy), summary(other, 1 - other, 0.1, 9.0))
        for accuracy, other in zip(ACCURACIES, REFERENCES, strict=True)
    ]


@pytest.mark.parametrize(
    ("values", "mean", "spread", "interval"),
    [
        # The quantile of Student's t with 2 degrees of freedom at 97.5 % is 4.30265.
        ([1.0, 2.0, 6.0], 3.0, 7**0.5, (3 - 4.30265273 * (7 / 3) ** 0.5, 3 + 4.30265273 * (7 / 3) ** 0.5)),
        ([0.5], 0.5, None, None),
        ([1.0, 2.0], 1.5, 0.5**0.5, None),
    ],
)
def test_aggregate_is_mean_spread_and_interval(
    values: list[float | None], mean: float, spread: float | None, interval: tuple[float, float] | None
) -> None:
    found = aggregate(values, with_interval=True)
    assert found is not None
    assert (found.mean, found.spread, found.count) == (mean, pytest.approx(spread), len(values))
    assert found.interval == (None if interval is None else pytest.approx(interval))
    assert aggregate(values) == found.model_copy(update={"interval": None})


def test_differences_are_from_the_averaged_model_of_all_reduce() -> None:
    found = differences(pairs(), "accuracy")
    assert list(found) == ["average_difference", "worst_difference", "loss_ratio", "worst_loss_ratio"]
    wanted = {
        "worst_difference": np.mean([100 * (a - 0.02 - b) for a, b in zip(ACCURACIES, REFERENCES, strict=True)]),
        "loss_ratio": np.mean([(1 - a) / (1 - b) for a, b in zip(ACCURACIES, REFERENCES, strict=True)]),
        "worst_loss_ratio": np.mean([(1.1 - a) / (1 - b) for a, b in zip(ACCURACIES, REFERENCES, strict=True)]),
    }
    for name, mean in wanted.items():
        value = found[name]
        assert value is not None
        assert value.mean == pytest.approx(mean), name


def test_differences_without_pairs_or_with_a_loss_that_is_not_finite_are_none() -> None:
    assert differences([], "loss") == {"loss_ratio": None, "worst_loss_ratio": None}
    found = differences([*pairs(), (summary(0.1, None), summary(0.9, 0.1))], "accuracy")
    assert found["loss_ratio"] is None
    assert found["average_difference"] is not None

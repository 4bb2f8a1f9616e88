"""Delays depend on seed, repetition, rank and step alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gossip.lab.benchmarks.stragglers import delay_s


def drawn(kind: str = "exponential", **changed: Any) -> float:
    return delay_s(kind, **{"seed": 0, "repetition": 0, "rank": 1, "step": 2, "compute_s": 0.3, **changed})


def test_stragglers_exponential_is_the_same_every_time_and_another_elsewhere() -> None:
    assert drawn() == drawn(compute_s=9.0)
    others = {drawn(**{key: 7}) for key in ("seed", "repetition", "rank", "step")}
    assert len(others | {drawn()}) == 5


def test_stragglers_exponential_has_the_mean_and_the_shape() -> None:
    delays = np.array([drawn(rank=rank, step=step) for rank, step in itertools.product(range(4), range(500))])
    assert delays.min() > 0
    assert delays.mean() == pytest.approx(0.05, rel=0.1)
    assert delays.std() == pytest.approx(0.05, rel=0.15)


def test_stragglers_at_half_speed_one_rank_takes_twice_as_long_as_the_others() -> None:
    assert [drawn("half_speed", rank=rank) for rank in range(3)] == [0.1, 0.05, 0.05]


def test_stragglers_one_slow_rank_takes_twice_as_long() -> None:
    assert [drawn("one_slow", rank=rank) for rank in range(3)] == [0.3, 0.0, 0.0]


def test_stragglers_none() -> None:
    assert drawn("none") == 0.0


def test_stragglers_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of none, exponential, one_slow, half_speed, got 'pareto'"):
        drawn("pareto")

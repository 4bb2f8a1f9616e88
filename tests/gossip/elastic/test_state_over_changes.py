"""What an algorithm keeps survives a change of ranks: common state stays equal on all, own state stays its rank's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from changing_ranks import (
    NUMEL,
    Changes,
    Dense,
    DenseDiLoCo,
    DenseNoLoCo,
    Outcome,
    run,
)
from elastic_ranks import RATE, targets
from tiers import rest_is_slow

import gossip
from gossip.lab.faults.fault import Fault


class DenseDiLoCoAwc(DenseDiLoCo):
    before_forward = False


class Row(NamedTuple):
    """An algorithm; the recursion that it follows; whether forward passes read exact averages; its topology."""

    algorithm: gossip.Algorithm
    dense: type[Dense] | None = None
    is_exact: bool = False
    topology: str = "complete"
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=RATE)


ROWS = {
    "diloco": Row(gossip.DiLoCo(period=4), DenseDiLoCo, is_exact=True),
    "diloco(awc)": Row(gossip.DiLoCo(period=4, form="awc"), DenseDiLoCoAwc),
    "streaming_diloco": Row(gossip.StreamingDiLoCo(period=4, parts=2, overlap=2)),
    "sparse_loco": Row(gossip.SparseLoCo(period=4, ratio=0.5, bits=4), is_exact=True),
    "noloco": Row(gossip.NoLoCo(period=4), DenseNoLoCo, topology="random_matching"),
    "slowmo": Row(gossip.SlowMo(period=4, slow_lr=0.7), topology="ring"),
    "gossip_pga": Row(gossip.GossipPGA(period=4, form="atc"), is_exact=True, topology="ring"),
}
OTHERS = {
    "adam_tracking": Row(gossip.AdamTracking(), topology="ring", optimizer=partial(torch.optim.Adam, lr=RATE)),
    "decentlam": Row(gossip.DecentLaM(beta=0.5), topology="ring"),
    "gradient_tracking": Row(gossip.GradientTracking(), topology="ring"),
    "integral_correction": Row(gossip.IntegralCorrection(), topology="ring"),
    "momentum_tracking": Row(gossip.MomentumTracking(), topology="ring"),
    "push_sum": Row(gossip.PushSum(), topology="ring"),
    "quasi_global_integral": Row(gossip.QuasiGlobalIntegral(beta=0.5), topology="ring"),
    "quasi_global_momentum": Row(gossip.QuasiGlobalMomentum(), topology="ring"),
    "relay_sum": Row(gossip.RelaySum(), topology="path"),
}

DEATHS = {
    "in mid-period": Changes((0, 1, 3), dies_before={2: 6}),
    "before it sends": Changes((0, 1, 3), faults={2: Fault(step=7)}),
    "between two buckets": Changes((0, 1, 3), faults={2: Fault(step=7, bucket=1)}),
    "within a message": Changes((0, 1, 3), faults={2: Fault(step=7, bucket=1, num_bytes=40)}),
    "after it has sent": Changes((0, 1, 3), dies_before={2: 8}),
    "of all but one": Changes((1,), dies_before={0: 6, 2: 6, 3: 6}),
}
CASES = [("diloco", death) for death in DEATHS] + [
    (name, death) for name in list(ROWS)[1:] for death in ("in mid-period", "before it sends")
]


def outcome_of(row: Row, changes: Changes, **options: Any) -> Outcome:
    return run(changes, algorithm=row.algorithm, topology=row.topology, optimizer=row.optimizer, **options)


def assert_train(outcome: Outcome) -> None:
    """No rank's parameters jump when the ranks change, and those who are left come closer to their optimum."""
    for story in outcome.stories.values():
        values = np.stack([moment.values for _, moment in sorted(story.moments.items())])
        moves = np.abs(np.diff(values, axis=0)).max((1, 2))
        assert moves.max() <= 5 * moves[:4].max()
    members = max(outcome.stories[min(outcome.stories)].moments.items())[1].members
    optimum = np.mean([targets(member, NUMEL).numpy() for member in members], axis=0)
    left = np.mean([max(outcome.stories[member].moments.items())[1].values for member in members], axis=0)
    assert np.linalg.norm(left - optimum) < 0.5 * np.linalg.norm(optimum)


def assert_are_alike(outcome: Outcome, row: Row) -> None:
    """Common state is: to the bit when a generation begins, later to rounding; and replicas after an exact exchange."""
    names = [name for name, how in row.algorithm.keeps.items() if how.scope == "common"]
    steps = sorted(set.intersection(*(set(story.moments) for story in outcome.stories.values())))
    by_step = [[story.moments[step] for story in outcome.stories.values()] for step in steps]
    begins = next(k for k, moments in enumerate(by_step) if moments[0].members != by_step[0][0].members)
    for name in names:
        assert all(np.array_equal(moment.kept[name], by_step[begins][0].kept[name]) for moment in by_step[begins])
        for moments in by_step[begins:]:
            assert np.ptp([moment.kept[name] for moment in moments], axis=0).max() < 1e-12
    if row.is_exact:
        assert min(np.ptp([moment.values for moment in moments], axis=0).max() for moments in by_step[-8:]) < 1e-12


@pytest.mark.parametrize(("name", "death"), rest_is_slow(CASES, 2))
def test_after_a_death(name: str, death: str) -> None:
    row = ROWS[name]
    outcome = outcome_of(row, DEATHS[death])
    assert set(outcome.stories) == set(DEATHS[death].expected)
    assert_are_alike(outcome, row)
    if row.dense is not None:
        row.dense(outcome).follow(outcome.stories)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_no_jump_after_a_death_and_a_join(name: str) -> None:
    changes = Changes((0, 1, 3, 4), dies_before={2: 6}, joins=True)
    assert_train(outcome_of(OTHERS[name], changes))


@pytest.mark.parametrize("name", rest_is_slow(ROWS))
def test_while_one_joins_and_one_leaves(name: str) -> None:
    row = ROWS[name]
    outcome = outcome_of(row, Changes((0, 1, 2, 3, 4), joins=True, leaves=(1,)))
    assert set(outcome.stories) == {0, 1, 2, 3, 4}
    joining_rank, others = outcome.stories[4], [outcome.stories[member] for member in (0, 2, 3)]
    assert others[0].moments[max(joining_rank.moments)].members == (0, 2, 3, 4)
    first = min(joining_rank.moments)
    for state, how in row.algorithm.keeps.items():
        if how.scope == "common":
            assert all(
                np.array_equal(joining_rank.moments[first].kept[state], o.moments[first].kept[state]) for o in others
            )
    if row.dense is not None:
        row.dense(outcome).follow(outcome.stories)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "noloco", "slowmo"])
def test_one_that_was_frozen_comes_back(name: str) -> None:
    row = ROWS[name]
    frozen = Changes((0, 2, 3, 4), faults={1: Fault("freeze", step=7, duration_s=3.0)})
    outcome = outcome_of(row, frozen, timeout=timedelta(seconds=1), partition_timeout=30)
    assert set(outcome.stories) == {0, 2, 3, 4}
    assert_are_alike(outcome, row)

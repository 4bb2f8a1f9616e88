"""Rank i has f_i(x) = 0.5 |A_i x - b_i|^2: who ends at the optimum of their sum, with a step that does not shrink."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import topologies
from gossip.algorithms import (
    AdaptThenCombine,
    AdaptWhileCommunicating,
    Algorithm,
    Arrived,
    BucketView,
    ExactDiffusion,
    Extra,
    GradientTracking,
    IntegralCorrection,
    MomentumTracking,
    QuasiGlobalIntegral,
)

NUM_RANKS, NUM_VALUES, NUM_STEPS, STEP = 12, 7, 6_000, 0.1
STATIC = ("ring", "torus")
OTHERS = ("exponential", "one_peer_exponential", "base", "random_matching", "equi_dyn")


class Problem(NamedTuple):
    """The Hessians [n, d, d], the gradients at 0 with the other sign [n, d], and the optimum [d]."""

    hessians: torch.Tensor
    slopes: torch.Tensor
    optimum: torch.Tensor


@functools.cache
def problem() -> Problem:
    random = np.random.default_rng(0)
    matrices = random.normal(size=(NUM_RANKS, NUM_VALUES, NUM_VALUES)) / np.sqrt(NUM_VALUES)
    targets = random.normal(size=(NUM_RANKS, NUM_VALUES))
    hessians = np.einsum("nki,nkj->nij", matrices, matrices)
    slopes = np.einsum("nki,nk->ni", matrices, targets)
    optimum = np.linalg.solve(hessians.sum(0), slopes.sum(0))
    return Problem(*map(torch.tensor, (hessians, slopes, optimum)))


@functools.cache
def matrices(topology: str) -> torch.Tensor:
    """Of all rounds that are different, [k, n, n]."""
    schedule = topologies.build(topology, NUM_RANKS)
    return torch.tensor(np.stack([schedule.round(t).matrix() for t in range(schedule.period or NUM_STEPS)]))


def largest_error(algorithm: Algorithm, topology: str) -> float:
    """Of any rank after all steps, relative to the optimum."""
    algorithm = algorithm.on(topologies.build(topology, NUM_RANKS))
    hessians, slopes, optimum = problem()
    x = nn.Parameter(torch.zeros(NUM_RANKS, NUM_VALUES, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=STEP)
    view = BucketView(x.data, [x], lambda flat: [flat], [optimizer])
    algorithm.begin(view)
    mixing = matrices(topology)
    got: dict[str, Arrived] = {}
    for step in range(NUM_STEPS):
        gradient = torch.einsum("nij,nj->ni", hessians, x.data) - slopes
        if got and not algorithm.before_forward:
            view.round_index = step - 1
            algorithm.arrive(view, got)
        view.round_index, view.before = step, view.values.clone()
        x.grad = algorithm.gradient(view, gradient)
        optimizer.step()
        view.follow_learning_rate()
        algorithm.updated(view)
        matrix = mixing[step % len(mixing)]
        got = {channel: Arrived(matrix @ sent - sent) for channel, sent in algorithm.message(view).items()}
        if algorithm.before_forward:
            algorithm.arrive(view, got)
    return float((x.data - optimum).norm(dim=1).max() / optimum.norm())


@pytest.mark.parametrize("algorithm", [AdaptWhileCommunicating(), AdaptThenCombine()], ids=lambda each: each.describe())
@pytest.mark.parametrize("topology", [*STATIC, "one_peer_exponential"])
def test_gossip_stalls_at_a_bias(algorithm: Algorithm, topology: str) -> None:
    assert 0.1 < largest_error(algorithm, topology) < 10


EXACT: list[tuple[Algorithm, tuple[str, ...]]] = [
    (ExactDiffusion(), STATIC),
    (Extra(), STATIC),
    (IntegralCorrection("awc"), (*STATIC, *OTHERS)),
    (IntegralCorrection("atc"), (*STATIC, *OTHERS)),
    (GradientTracking("atc"), (*STATIC, *OTHERS)),
    (GradientTracking("awc"), OTHERS),  # on a static sparse graph it diverges at this step
    (MomentumTracking("atc"), STATIC),
    (QuasiGlobalIntegral(form="awc"), (*STATIC, "base")),  # with the textbook's gains it diverges on the latter
    (QuasiGlobalIntegral(form="atc"), (*STATIC, "base")),
]


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [(algorithm, topology) for algorithm, topologies_ in EXACT for topology in topologies_],
    ids=lambda each: each if isinstance(each, str) else each.describe(),
)
def test_corrected_algorithms_end_at_the_optimum(algorithm: Algorithm, topology: str) -> None:
    assert largest_error(algorithm, topology) < 1e-10

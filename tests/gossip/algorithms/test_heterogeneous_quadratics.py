"""Whose recursion ends at the optimum of the sum, with a step that does not shrink, where ranks hold different data."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from algorithm_table import ROWS
from quadratics import Array, Problem, Sgd, constant

import topologies

NUM_RANKS, NUM_STEPS = 12, 6_000
STATIC = ("ring", "torus")
OTHERS = ("exponential", "one_peer_exponential", "base", "random_matching", "equi_dyn")


@functools.cache
def optimum() -> Array:
    problem = Problem(NUM_RANKS, 1)
    hessians = np.einsum("nki,nkj->ij", problem.matrices, problem.matrices)
    found: Array = np.linalg.solve(hessians, np.einsum("nki,nk->i", problem.matrices, problem.targets))
    return found


def largest_error(name: str, topology: str) -> float:
    """Of any rank after all steps, relative to the optimum."""
    problem, sgd = Problem(NUM_RANKS, NUM_STEPS), Sgd(constant, momentum=0.0)
    x = ROWS[name].dense(problem, topologies.build(topology, NUM_RANKS), sgd, None)
    return float(np.linalg.norm(x - optimum(), axis=1).max() / np.linalg.norm(optimum()))


@pytest.mark.parametrize("name", ["adapt_while_communicating", "adapt_then_combine"])
@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
def test_gossip_stalls_at_a_bias(name: str, topology: str) -> None:
    assert 0.1 < largest_error(name, topology) < 10


EXACT = {
    "exact_diffusion": STATIC,
    "extra": STATIC,
    "integral_correction": (*STATIC, *OTHERS),
    "integral_correction(atc)": (*STATIC, *OTHERS),
    "gradient_tracking": OTHERS,
    "gradient_tracking(atc)": (*STATIC, *OTHERS),
    "momentum_tracking(atc)": STATIC,
    "quasi_global_integral": (*STATIC, "base"),
    "quasi_global_integral(atc)": (*STATIC, "base"),
}


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        pytest.param(name, topology, marks=[pytest.mark.slow] * (topology != chosen[0]))
        for name, chosen in EXACT.items()
        for topology in chosen
    ],
)
def test_corrected_algorithms_end_at_the_optimum(name: str, topology: str) -> None:
    assert largest_error(name, topology) < 1e-10

"""Whose recursion ends at the optimum of the sum, with a step that does not shrink, where ranks hold different data."""

import functools

import numpy as np
import pytest
from algorithm_table import ROWS
from quadratics import Array, Problem, Sgd, constant
from tiers import rest_is_slow

import topologies

NUM_RANKS, NUM_STEPS = 12, 6_000


@functools.cache
def optimum() -> Array:
    problem = Problem(NUM_RANKS, 1)
    hessians = np.einsum("nki,nkj->ij", problem.matrices, problem.matrices)
    return np.linalg.solve(hessians, np.einsum("nki,nk->i", problem.matrices, problem.targets))


def largest_error(name: str, topology: str) -> float:
    """Of any rank after all steps, relative to the optimum."""
    problem, sgd = Problem(NUM_RANKS, NUM_STEPS), Sgd(constant, momentum=0.0)
    x = ROWS[name].dense(problem, topologies.build(topology, NUM_RANKS), sgd, None)
    return float(np.linalg.norm(x - optimum(), axis=1).max() / np.linalg.norm(optimum()))


@pytest.mark.parametrize("name", ["adapt_while_communicating", "adapt_then_combine", "factored_gossip"])
def test_gossip_stalls_at_a_bias(name: str) -> None:
    assert 0.1 < largest_error(name, "ring") < 10


EXACT = {  # an algorithm that serves several kinds of topologies with one of each
    "exact_diffusion": ("ring",),
    "extra": ("torus",),
    "integral_correction": ("ring", "one_peer_exponential", "random_matching"),
    "integral_correction(atc)": ("torus", "exponential", "base"),
    "gradient_tracking": ("exponential", "equi_dyn"),
    "gradient_tracking(atc)": ("ring", "base"),
    "momentum_tracking(atc)": ("torus",),
    "factored_gossip(rounds, kappa)": ("one_peer_exponential", "base", "complete"),
    "factored_gossip(rounds, kappa)(atc)": ("ring", "random_matching"),
    "quasi_global_integral": ("ring", "base"),
    "quasi_global_integral(atc)": ("torus",),
}


@pytest.mark.parametrize(
    ("name", "topology"),
    [row for name, chosen in EXACT.items() for row in rest_is_slow([(name, topology) for topology in chosen])],
)
def test_corrected_algorithms_end_at_the_optimum(name: str, topology: str) -> None:
    assert largest_error(name, topology) < 1e-10

"""The stable rates of a topology: the recursion against the algorithms' own hooks, and its table at small sizes."""

from __future__ import annotations

import math

import pytest
import torch
from repository import REPOSITORY
from torch import nn

import topologies
from gossip.algorithms import (
    AdaptThenCombine,
    AdaptWhileCommunicating,
    Algorithm,
    Arrived,
    BucketView,
    IntegralCorrection,
)
from gossip.algorithms.base import Form
from gossip.lab.benchmarks import stability
from topologies import Topology


def growth_of_hooks(algorithm: Algorithm, topology: Topology, step: float, num_steps: int) -> float:
    """By what a random disagreement has grown per step, in the second half of the steps."""
    algorithm = algorithm.on(topology)
    x = nn.Parameter(
        torch.randn(topology.world_size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    optimizer = torch.optim.SGD([x], lr=1.0)
    view = BucketView(x.data, [x], lambda flat: [flat], [optimizer])
    algorithm.begin(view)
    got, norms = None, []
    for number in range(num_steps):
        x.grad = step * x.data
        if got is not None and not algorithm.before_forward:
            algorithm.arrive(view, got)
        optimizer.step()
        view.follow_learning_rate()
        algorithm.updated(view)
        matrix = torch.tensor(topology.round(number).matrix())
        got = {"values": Arrived(matrix @ view.values - view.values)}
        if algorithm.before_forward:
            algorithm.arrive(view, got)
        norms.append(float(x.data.norm()))
    return float((norms[-1] / norms[num_steps // 2 - 1]) ** (2 / num_steps))


@pytest.mark.parametrize("step", [0.3, 1.1, 1.9])
@pytest.mark.parametrize("name", ["ring", "one_peer_exponential", "base"])
@pytest.mark.parametrize("form", ["awc", "atc"])
def test_growth_is_that_of_the_hooks(form: Form, name: str, step: float) -> None:
    topology = topologies.build(name, 6)
    gossip = AdaptWhileCommunicating() if form == "awc" else AdaptThenCombine()
    for algorithm, gain in (
        (gossip, stability.Gain()),
        (IntegralCorrection(form), stability.default_gain(topology, form)),
        (IntegralCorrection(form, gamma=0.9, kappa=0.9), stability.Gain(0.9, 0.9)),
    ):
        expected = stability.growth(topology, form, gain, step)
        num_steps = 2 * min(150, int(13 / abs(math.log(expected))))  # until what decays is as small as rounding
        assert growth_of_hooks(algorithm, topology, step, num_steps) == pytest.approx(expected, abs=0.03)


def test_limits_of_a_ring_are_those_of_its_eigenvalues() -> None:
    """1 + lambda for the smallest, -1/3, and 2; EXTRA's, whose matrix is (1 + W) / 2, is larger."""
    ring = topologies.build("ring", 8)
    assert stability.largest_rate(ring, "awc", stability.Gain()) == pytest.approx(2 / 3, abs=1e-3)
    assert stability.largest_rate(ring, "awc", stability.default_gain(ring, "awc")) == pytest.approx(1, abs=1e-3)
    assert stability.largest_rate(ring, "atc", stability.Gain()) == pytest.approx(2, abs=0.003)


def test_documented_table_is_what_is_computed() -> None:
    lines = (REPOSITORY / "docs" / "stability.md").read_text().splitlines()
    documented = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]
    assert {row[0] for row in documented} >= {name for name in topologies.available() if stability.built(name, 4)}
    for name, size, *cells in documented[:: len(documented) // 20]:
        topology = stability.built(name, int(size))
        if int(size) > 16 or topology.period is None:
            continue  # takes its time
        for number, form in enumerate(stability.FORMS):
            assert f"{stability.largest_rate(topology, form, stability.Gain()):.3f}" == cells[2 * number]
            gain = stability.default_gain(topology, form)
            assert f"{stability.largest_rate(topology, form, gain):.3f}" == cells[2 * number + 1]

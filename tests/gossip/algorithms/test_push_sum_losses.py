"""Push-sum where messages are lost: a sender that knows keeps what was not delivered."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import topologies
from gossip import VirtualWorkers
from gossip.algorithms import PushSum
from topologies import Round, Topology

NUM_RANKS, NUM_LOST_IN_TEN = 8, 2


def lossy(topology: Topology) -> Topology:
    """Directed rounds of which each message is lost with a probability of 20 %; its weight stays with its sender."""

    def round_(step: int) -> Round:
        matrix = topology.round(step).matrix().copy()
        random = np.random.default_rng(step)
        for target, source in zip(*np.nonzero(matrix), strict=True):
            if target != source and random.integers(10) < NUM_LOST_IN_TEN:
                matrix[source, source] += matrix[target, source]
                matrix[target, source] = 0
        return Round.from_matrix(matrix)

    return Topology.from_function(round_, stochasticity="column", name="lossy")


def spread_after(num_rounds: int, topology: Topology, algorithm: PushSum) -> float:
    """How far the farthest rank is from the mean of where all began, relative to how far they were at first.

    They learn in the first step alone, each from its own batch.
    """
    torch.manual_seed(0)
    linear, sgd = nn.Linear(6, 1).double(), partial(torch.optim.SGD, lr=0.1)
    workers = VirtualWorkers(linear, NUM_RANKS, sgd, topology, algorithm=algorithm, devices=["cpu"])
    inputs = torch.randn(NUM_RANKS, 6, dtype=torch.float64)
    (workers(inputs) ** 2).sum().backward()
    begin = torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1)
    workers.optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(num_rounds):
        (workers(inputs) ** 2).sum().backward()
    end = torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1)
    return float((end - begin.mean(0)).norm(dim=1).max() / (begin - begin.mean(0)).norm(dim=1).max())


@pytest.mark.parametrize("name", ["directed_ring", "exponential", "one_peer_exponential"])
def test_ratio_is_the_exact_mean_whatever_was_lost(name: str) -> None:
    topology = lossy(topologies.build(name, NUM_RANKS))
    assert any(not np.allclose(topology.round(step).matrix().sum(1), 1) for step in range(5))  # rows are biased
    assert spread_after(0, topology, PushSum()) == 1
    assert spread_after(500, topology, PushSum()) < 1e-12

"""The algorithm of docs/extending/algorithm.md works as it stands there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples import defined
from torch import nn

import gossip
import topologies
from gossip import Algorithm, VirtualWorkers

NUM_STEPS = 7
make_sgd = partial(torch.optim.SGD, lr=0.1)


def heavy_ball() -> Algorithm:
    algorithm: Algorithm = defined("docs/extending/algorithm.md", 0)["HeavyBall"]()
    return algorithm


class Shift(nn.Module):
    """Its loss pulls every rank to another place."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.x - targets).square().sum(-1)


def targets(world_size: int) -> torch.Tensor:
    return torch.arange(world_size * 5, dtype=torch.float64).view(world_size, 5).sin()


def dense(world_size: int) -> np.ndarray:
    topology, wanted = topologies.build("one_peer_exponential", world_size), targets(world_size).numpy()
    x = velocity = np.zeros_like(wanted)
    for step in range(NUM_STEPS):
        gradients = x - wanted
        if step:
            velocity = 0.5 * velocity + topology.round(step - 1).matrix() @ x - x
            x = x + 0.5 * velocity
        x = x - 0.1 * gradients
    return x


def make_workers(world_size: int) -> VirtualWorkers:
    return VirtualWorkers(Shift(), world_size, make_sgd, algorithm=heavy_ball(), loss_reduction="sum", devices=["cpu"])


def train(workers: VirtualWorkers, steps: int) -> np.ndarray:
    for _ in range(steps):
        workers(targets(workers.world_size)).sum().backward()
    (stack,) = workers.parameters()
    return stack.detach().numpy().copy()


def test_added_algorithm_makes_its_recursion_and_is_restored(tmp_path: Path) -> None:
    workers = make_workers(6)
    train(workers, 3)
    gossip.save(workers, tmp_path)
    found = train(workers, NUM_STEPS - 3)
    np.testing.assert_allclose(found, dense(6), rtol=0, atol=1e-13)
    restored = make_workers(6)
    gossip.load(restored, tmp_path)
    assert (train(restored, NUM_STEPS - 3) == found).all()

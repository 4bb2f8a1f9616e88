"""Integral correction beside Adam: where its updates vanish, with second moments of one's own and with mixed ones."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import topologies
from gossip import VirtualWorkers
from gossip.algorithms import IntegralCorrection
from gossip.algorithms.base import Form

RATE, BETAS, EPSILON, NUM_RANKS = 0.02, (0.9, 0.99), 1e-8, 5
OPTIMA = np.array([3.0, -1.0, 0.5, -2.0, 1.25])
NOISE = np.array([0.05, 5.0, 0.2, 2.0, 0.5])


class Scalar(nn.Module):
    """0.5 (x - optimum)^2 + noise x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.x - batch[:, 0]) ** 2 + batch[:, 1] * self.x


def batch(step: int) -> torch.Tensor:
    """Optimum and noise of each rank, [n, 2]; the noise of two steps adds up to nothing."""
    signs = np.random.default_rng(step // 2).choice([-1.0, 1.0], NUM_RANKS) * (-1) ** step
    return torch.tensor(np.stack([OPTIMA, signs * NOISE], 1))


def train(algorithm: IntegralCorrection, num_steps: int) -> np.ndarray:
    """The values at the end, [n]."""
    adam = partial(torch.optim.Adam, lr=RATE, betas=BETAS, eps=EPSILON)
    workers = VirtualWorkers(Scalar(), NUM_RANKS, adam, "exponential", algorithm=algorithm, devices=["cpu"])
    (stack,) = workers.parameters()
    for step in range(num_steps):
        workers(batch(step)).mean().backward()
    return stack.detach().numpy()


def dense(form: Form, num_steps: int) -> np.ndarray:
    """Adam as its paper defines it, of all ranks, with values and second moments mixed by the same W."""
    topology = topologies.build("exponential", NUM_RANKS)
    matrix = topology.round(0).matrix()
    gamma, kappa = IntegralCorrection(form).on(topology).gains(0)
    x, correction, first, second = (np.zeros(NUM_RANKS) for _ in range(4))
    for step in range(num_steps):
        optima, noise = batch(step).numpy().T
        gradients = x - optima + noise

        def combine() -> None:
            nonlocal x, correction, second
            pull = matrix @ x - x
            x, correction, second = x + gamma * pull, correction + kappa * pull, matrix @ second

        if form == "awc" and step:
            combine()
        first = BETAS[0] * first + (1 - BETAS[0]) * gradients
        second = BETAS[1] * second + (1 - BETAS[1]) * gradients**2
        corrected = second / (1 - BETAS[1] ** (step + 1))
        x = x - RATE * first / (1 - BETAS[0] ** (step + 1)) / (np.sqrt(corrected) + EPSILON) + correction
        if form == "atc":
            combine()
    return x


@pytest.mark.parametrize("form", ["awc", "atc"])
def test_second_moments_are_mixed_like_values(form: Form) -> None:
    found = train(IntegralCorrection(form, second_moment="exchange"), 20)
    np.testing.assert_allclose(found, dense(form, 20), rtol=0, atol=1e-12)

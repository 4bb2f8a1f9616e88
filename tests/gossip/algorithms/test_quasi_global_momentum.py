"""Quasi-global momentum where it can be written down: two ranks that average, on quadratics of one curvature."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from gossip import VirtualWorkers
from gossip.algorithms import QuasiGlobalMomentum
from gossip.algorithms.forms import Form

CURVATURE, OPTIMA, RATE, BETA = 0.7, np.array([2.0, -0.5]), 0.3, 0.9


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, optimum: torch.Tensor) -> torch.Tensor:
        return 0.5 * CURVATURE * (self.x - optimum) ** 2


def closed_form(form: Form, num_steps: int) -> np.ndarray:
    r"""Eigenvalues to the power of the steps, of the mean and of half the difference each.

    Both modes are linear in (x, m, pull or nothing), about where they end; in the mean mode nothing is pulled. With
    e = rate * curvature, and lambda = 1 or 0 what an average leaves of a mode.
    """
    e, beta = RATE * CURVATURE, BETA
    found = []
    for kept, optimum, start in ((1.0, OPTIMA.mean(), 1.0), (0.0, (OPTIMA[0] - OPTIMA[1]) / 2, 0.0)):
        # x' = a x + b m + c optimum, in units where m is a movement: RATE m.
        if form == "awc":
            row = np.array([kept - e, -beta, e * optimum])
        else:
            row = kept * np.array([1 - e, -beta, e * optimum])
        first = np.array([1 - e, -beta, e * optimum]) if form == "awc" else row  # nothing has arrived yet
        steps = []
        for x_row in (first, row):
            moved = np.array([1.0, 0, 0]) - x_row
            steps.append(np.stack([x_row, beta * np.array([0, 1.0, 0]) + (1 - beta) * moved, [0, 0, 1.0]]))
        values, vectors = np.linalg.eig(steps[1].astype(complex))
        state = np.linalg.solve(vectors, steps[0] @ np.array([start, 0.0, 1.0]))
        found.append((vectors @ (values ** (num_steps - 1) * state))[0].real)
    return np.array([found[0] + found[1], found[0] - found[1]])


@pytest.mark.parametrize("num_steps", [1, 2, 7, 40])
@pytest.mark.parametrize("form", ["awc", "atc"])
def test_two_ranks_follow_the_closed_form(form: Form, num_steps: int) -> None:
    sgd = partial(torch.optim.SGD, lr=RATE)
    algorithm = QuasiGlobalMomentum(BETA, form)
    workers = VirtualWorkers(Scalar(), 2, sgd, "complete", algorithm=algorithm, devices=["cpu"])
    for _ in range(num_steps):
        workers(torch.tensor(OPTIMA)).mean().backward()
    (stack,) = workers.parameters()
    np.testing.assert_allclose(stack.detach(), closed_form(form, num_steps), rtol=0, atol=1e-11)

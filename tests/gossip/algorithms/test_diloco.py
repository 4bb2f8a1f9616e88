"""DiLoCo between its limits, and what it refuses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from gossip import Algorithm, VirtualWorkers
from gossip.algorithms import AdaptThenCombine, AdaptWhileCommunicating, DiLoCo


def train(algorithm: Algorithm, topology: str = "complete") -> np.ndarray:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    workers = VirtualWorkers(module, 4, sgd, topology, algorithm=algorithm, devices=["cpu"])
    for step in range(8):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        workers(inputs).square().mean().backward()
    return torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1).numpy()


@pytest.mark.parametrize(("form", "gossip"), [("atc", AdaptThenCombine()), ("awc", AdaptWhileCommunicating())])
def test_an_average_after_every_step_at_outer_rate_1_without_momentum_is_gossip(form: str, gossip: Algorithm) -> None:
    found = train(DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0, form=form))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, train(gossip), rtol=0, atol=1e-12)


def test_topology_that_is_no_exact_average_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"topology 'ring' does not average over all ranks .* choose topology=\"complete\""
    ):
        train(DiLoCo(), "ring")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"period": 0}, "period must be a number of steps, at least 1, got 0"),
        ({"outer_lr": -1.0}, r"outer_lr must be above 0, got -1\.0"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be from 0 and below 1, got 1\.0"),
        ({"form": "cta"}, "form must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DiLoCo(**arguments)  # type: ignore[arg-type]

"""Ranks with different numbers of batches."""

from __future__ import annotations

import functools
from datetime import timedelta

import numpy as np
import pytest
import torch
from ranks import run_ranks
from recursion import dense_recursion
from replicas import gathered
from small_runs import MODES, finish, gradient_at
from torch import nn

from gossip import ExchangeError, GossipDataParallel, launch
from topologies import build

LR = 0.1
NUM_BATCHES = (3, 5, 2, 5)


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False, dtype=torch.float64)


def make_model(**arguments: object) -> GossipDataParallel:
    return GossipDataParallel(make_module(), functools.partial(torch.optim.SGD, lr=LR), "ring", **arguments)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(inputs(rank, step)).square().mean()


def train(model: GossipDataParallel, num_batches: int, first: int = 0) -> None:
    for step in range(first, first + num_batches):
        loss_of(model, model.rank, step).backward()
        finish(model)


def join_twice(mode: str) -> tuple[int, torch.Tensor]:
    model = make_model(**MODES[mode])
    with model.join():
        train(model, NUM_BATCHES[model.rank])
    assert model.step == max(NUM_BATCHES)
    train(model, 1, first=5)
    with model.join():
        train(model, model.rank, first=6)
    values = gathered(model.module.weight.detach())
    steps = model.step
    model.close()
    return steps, values


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_ended_exchange_until_all_have(mode: str) -> None:
    """The recursion with u = 0 for ranks without a batch; all leave the block after the same step."""
    counted = [[*range(NUM_BATCHES[rank]), 5, *range(6, 6 + rank)] for rank in range(4)]
    module, start = make_module(), make_module().weight.detach().flatten().numpy()

    def gradient(rank: int, step: int, x: np.ndarray) -> np.ndarray:
        return gradient_at(module, x, loss_of, rank, step) if step in counted[rank] else 0 * x

    wanted = dense_recursion(build("ring", 4), start, gradient, lambda x, g: x - LR * g, num_steps=9)
    for steps, values in run_ranks(join_twice, mode, world_size=4):
        assert steps == 9
        torch.testing.assert_close(values.view(4, 3), torch.from_numpy(wanted), rtol=0, atol=1e-12)


def raise_inside() -> str:
    model = make_model()
    model.world.timeout = timedelta(seconds=2)  # once both are there
    try:
        with model.join():
            if model.rank == 1:
                raise ZeroDivisionError
            train(model, 1)
    except ZeroDivisionError:
        return "left"
    except ExchangeError as error:
        return str(error)
    return "ended"


def test_exception_inside_join_leaves_it_at_once() -> None:
    waiting, left = launch(raise_inside, world_size=2)
    assert left == "left"
    assert "rank 0: waiting in join()" in waiting
    assert "rank 1" in waiting

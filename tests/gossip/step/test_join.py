"""Ranks with different numbers of batches."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from recursion import dense_recursion
from replicas import gathered
from torch import nn

from gossip import ExchangeError, GossipDataParallel, launch
from topologies import build

LR = 0.1
NUM_BATCHES = (3, 5, 2, 5)
MODES = {"in backward": {}, "all at once": {"clip_grad_norm": 1e9}, "outside": {"step_in_backward": False}}


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def make_model(world_size: int, **arguments: object) -> GossipDataParallel:
    torch.manual_seed(0)
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    topology = build("ring", world_size)
    return GossipDataParallel(module, functools.partial(torch.optim.SGD, lr=LR), topology, **arguments)


def train(model: GossipDataParallel, num_batches: int, first: int = 0) -> None:
    for step in range(first, first + num_batches):
        model(inputs(model.rank, step)).square().mean().backward()
        if not model._arguments.step_in_backward:
            model.optimizer.step()
            model.optimizer.zero_grad()


def join_twice(mode: str) -> tuple[int, torch.Tensor]:
    model = make_model(4, **MODES[mode])
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

    def batch_of(rank: int, step: int) -> int | None:
        mine = counted[rank]
        if step < 5:
            return step if step < NUM_BATCHES[rank] else None
        return step if step in mine else None

    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)

    def gradient(rank: int, step: int, x):
        batch = batch_of(rank, step)
        if batch is None:
            return x * 0
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(x).view(1, 3))
        (result,) = torch.autograd.grad(module(inputs(rank, batch)).square().mean(), module.weight)
        return result.flatten().numpy()

    torch.manual_seed(0)
    start = nn.Linear(3, 1, bias=False, dtype=torch.float64).weight.detach().flatten().numpy()
    wanted = dense_recursion(build("ring", 4), start, gradient, lambda x, g: x - LR * g, num_steps=9)
    for steps, values in run_ranks(join_twice, mode, world_size=4):
        assert steps == 9
        torch.testing.assert_close(values.view(4, 3), torch.from_numpy(wanted), rtol=0, atol=1e-12)


def train_unevenly() -> str:
    model = make_model(2)
    model.world.timeout = timedelta(seconds=2)  # once both are there
    try:
        train(model, 4 if model.rank == 0 else 2)
    except ExchangeError as error:
        dist.send(torch.zeros(1), 1)
        return str(error)
    dist.recv(torch.zeros(1), 0)  # stays alive until its peer has given up
    return "ended"


def test_without_join_the_time_out_names_who_is_missing() -> None:
    waiting, ended = launch(train_unevenly, world_size=2)
    assert ended == "ended"
    assert (
        "rank 0: step 2, bucket 0: timed out after 2 s waiting for" in waiting
    )  # what left in step 2, which rank 1 did not make
    assert "rank 1" in waiting


def raise_inside() -> str:
    model = make_model(2)
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

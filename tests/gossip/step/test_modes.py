"""Every way of making steps against the dense recursion and against each other, with real processes."""

import functools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import on_ranks
from small_runs import MODES, SGD, TOPOLOGY, assert_rows, flat, rows_after, train, wrap
from torch import nn

from gossip import AdaptThenCombine, AdaptWhileCommunicating, GossipDataParallel, GossipError
from topologies import Round, Topology, build

NUM_STEPS = 8
WORLD_SIZE = 3
ALGORITHMS = {
    "while, gamma": functools.partial(AdaptWhileCommunicating, 0.5),
    "then, gamma by round": functools.partial(AdaptThenCombine, lambda t: 1 / (1 + t)),
}


class Attending(nn.Module):
    """Reads parameters that it does not own, and has a branch, tied weights and a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.sometimes = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().clone())
        self.extra = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.embed(x)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        if step % 3 == 1:
            hidden = self.sometimes(hidden)
        return nn.functional.linear(hidden * self.extra, self.head.weight)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return Attending().double()


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return module(torch.randn(3, 2, 5, generator=generator, dtype=torch.float64), step).square().mean()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(WORLD_SIZE)
def test_every_mode_equals_the_recursion_with_the_same_bits(algorithm: str) -> None:
    """x <- (1 - gamma) x + gamma W x before or after u, as rounds of their own."""
    rounds, gamma = [], ALGORITHMS[algorithm]().gamma
    for t in range(NUM_STEPS):
        factor = gamma(t) if callable(gamma) else gamma
        matrix = build(TOPOLOGY, WORLD_SIZE).round(t).matrix()
        rounds.append(Round.from_matrix((1 - factor) * np.eye(WORLD_SIZE) + factor * matrix))
    dense = {"make": make_module, "loss": loss_of, "topology": Topology.from_rounds(rounds)}
    wanted = rows_after(range(NUM_STEPS), WORLD_SIZE, combines_first=algorithm.startswith("then"), **dense)
    results = []
    for mode in (*MODES.values(), {"clip_grad_norm": math.inf, "clip": "bucket"}):
        with wrap(make_module(), algorithm=ALGORITHMS[algorithm](), **mode) as model:
            train(model, range(NUM_STEPS), loss_of)
            model.state_dict()  # adapt-then-combine is awaited before it
            assert_rows(model, wanted)
            results.append(flat(model))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@on_ranks(2)
def test_buckets_are_awaited_by_the_lowest_module_that_holds_every_user() -> None:
    """Once a training forward has been seen."""
    module = make_module()
    model = GossipDataParallel(module, SGD, "ring", algorithm="adapt_then_combine", bucket_cap_mb=1 / 2**20)
    loss_of(model, model.rank, 0).backward()
    awaited: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            for index in hook._buckets:
                awaited.setdefault(model._buckets[index].names[0], []).append(name)
    assert awaited["attention.out_proj.weight"] == ["attention", "attention.out_proj"]
    assert awaited["norm.weight"] == ["norm"]
    assert awaited["embed.weight"] == ["embed"]
    assert awaited["extra"] == [""]
    assert awaited["head.weight"] == ["", "head"]  # read by the model itself
    assert awaited["sometimes.weight"] == ["", "sometimes"]  # not seen in the first forward


class ReadLate(nn.Module):
    """From step 2 on reads a layer's parameter before the layer is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.peeks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer.weight if self.peeks else self.layer(x)


@on_ranks(2, anew=True)
def test_parameter_read_before_it_is_combined_is_refused_by_name() -> None:
    module = ReadLate()
    model = GossipDataParallel(module, SGD, "ring", algorithm="adapt_then_combine")
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    module.peeks = True
    text = "step 2, bucket 0: parameter 'layer.weight' was read before its exchange was combined"
    with pytest.raises(GossipError, match=text):
        model(torch.ones(2, 3)).sum().backward()


def test_zero_grad_waits_for_nobody() -> None:
    with GossipDataParallel(nn.Linear(2, 1), SGD, "ring", algorithm="atc") as model:
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        with mock.patch.object(model._engine, "combine_if_due", side_effect=AssertionError("it waits")):
            model.zero_grad()
        assert model.module.weight.grad is None

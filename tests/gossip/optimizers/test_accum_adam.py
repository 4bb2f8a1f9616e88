"""AccumAdam and AccumAdamW against their definition in numpy, Adam, and through checkpoints; what MuonAdamW needs."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from gossip import AccumAdam, AccumAdamW, MuonAdamW
from gossip.optimizers.scopes import Scope, names_needed_whole, scope_of

LR, BETAS, EPS, DECAY = 0.05, (0.8, 0.95), 1e-3, 0.1
KINDS = [AccumAdam, AccumAdamW]


def gradients(num_steps: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num_steps, 5))


def train(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: np.ndarray) -> np.ndarray:
    for gradient in steps:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameter.detach().numpy().copy()


def make(kind: type[AccumAdam], accum_iter: int) -> tuple[nn.Parameter, AccumAdam]:
    parameter = nn.Parameter(torch.arange(5, dtype=torch.float64))
    return parameter, kind([parameter], LR, BETAS, EPS, DECAY, accum_iter=accum_iter)


@pytest.mark.parametrize("accum_iter", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_the_definition(kind: type[AccumAdam], accum_iter: int) -> None:
    steps = gradients(10)
    x, moments, accumulated = np.arange(5.0), [np.zeros(5), np.zeros(5)], np.zeros(5)
    for number, own in enumerate(steps, 1):
        gradient = own + (DECAY * x if kind is AccumAdam else 0)
        x = x * (1 if kind is AccumAdam else 1 - LR * DECAY)
        mean, square = (
            (beta * moment + (1 - beta) * gradient**power) / (1 - beta ** math.ceil(number / accum_iter))
            for beta, moment, power in zip(BETAS, moments, (1, 2), strict=True)
        )
        x = x - LR * mean / (np.sqrt(square) + EPS)
        accumulated = accumulated + gradient / accum_iter
        if number % accum_iter == 0:
            moments = [
                beta * moment + (1 - beta) * accumulated**power
                for beta, moment, power in zip(BETAS, moments, (1, 2), strict=True)
            ]
            accumulated = np.zeros(5)
    np.testing.assert_allclose(train(*make(kind, accum_iter), steps), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_on_in_the_middle_of_an_accumulation(kind: type[AccumAdam]) -> None:
    steps = gradients(10)
    parameter, optimizer = make(kind, 4)
    train(parameter, optimizer, steps[:6])
    restored = nn.Parameter(parameter.detach().clone())
    other = kind([restored], accum_iter=9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (train(restored, other, steps[6:]) == train(parameter, optimizer, steps[6:])).all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -1.0}, r"lr must be at least 0, got -1\.0"),
        ({"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers of at least 0 and below 1, got \(0\.9, 1\.0\)"),
        ({"accum_iter": 0}, "accum_iter must be a number of steps, at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AccumAdamW([nn.Parameter(torch.zeros(2))], **arguments)  # type: ignore[arg-type]


def test_each_group_has_what_its_optimizer_needs() -> None:
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("multihead_attn", "head")})
    optimizer = MuonAdamW(module.named_parameters())
    assert [scope_of(optimizer, [group]) for group in optimizer.param_groups] == [Scope.PARAMETER, Scope.ELEMENT]
    assert names_needed_whole(MuonAdamW, module) == {"multihead_attn.weight"}
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    added.grad = torch.ones(2)
    loss = optimizer.step(lambda: 3.0)
    assert (loss, added.tolist()) == (3.0, pytest.approx([0.45] * 2))


def test_what_it_cannot_use_is_refused() -> None:
    with pytest.raises(TypeError, match=r"was given a Parameter; pass module.named_parameters\(\)"):
        MuonAdamW(nn.Linear(2, 2).parameters())
    names = ("head", "lm_head", "embed_tokens", "wte")
    with pytest.raises(ValueError, match=r"begins with one of adamw_on, \['emb', 'wte', .*; choose AdamW"):
        MuonAdamW(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}).named_parameters())
    with pytest.raises(ValueError, match=r"adamw_on must be a list .*, got 'head'"):
        MuonAdamW(nn.Linear(2, 2).named_parameters(), adamw_on="head")
    with pytest.raises(ValueError, match=r"adamw_lr must be at least 0 and finite, got -1"):
        MuonAdamW(nn.Linear(2, 2).named_parameters(), adamw_lr=-1)

"""One optimizer stepped bucket by bucket is the same optimizer stepped at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gossip import GossipDataParallel

TINY_BUCKETS = 71 / 2**20
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad fused": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def split_groups(named: list[tuple[str, nn.Parameter]], factory: Callable[..., torch.optim.Optimizer]) -> object:
    """Biases with a rate of their own."""
    return factory(
        [
            {"params": [p for name, p in named if name.endswith("weight")]},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.003},
        ]
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buckets_step_as_the_whole_does(name: str) -> None:
    plain = make_module()
    optimizer = split_groups(list(plain.named_parameters()), OPTIMIZERS[name])
    model = GossipDataParallel(
        make_module(), functools.partial(split_groups, factory=OPTIMIZERS[name]), bucket_cap_mb=TINY_BUCKETS
    )
    for step in range(6):
        for group in (*optimizer.param_groups, *model.optimizer.param_groups):
            group["lr"] *= 0.9  # what schedulers do
        plain(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
    for (key, wanted), actual in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(actual, wanted), key
    wanted_state, state = optimizer.state_dict()["state"], model.optimizer.state_dict()["state"]
    assert wanted_state.keys() == state.keys()
    for index in wanted_state:
        for key, value in wanted_state[index].items():
            assert torch.equal(torch.as_tensor(state[index][key]), torch.as_tensor(value)), key
    model.close()


def test_step_has_nothing_left_to_do_and_refuses_a_closure() -> None:
    model = GossipDataParallel(make_module(), OPTIMIZERS["sgd"])
    model(batch(0)).square().mean().backward()
    values = copy.deepcopy(model.state_dict())
    model.optimizer.step()
    model.optimizer.zero_grad()
    for key, value in values.items():
        assert torch.equal(model.state_dict()[key], value), key
    with pytest.raises(ValueError, match="the update was made inside backward"):
        model.optimizer.step(lambda: 0.0)


def test_group_added_after_wrapping_is_trained_from_then_on() -> None:
    module, plain = make_module(), make_module()
    model = GossipDataParallel(module, torch.optim.SGD(module[4].parameters(), lr=0.1), bucket_cap_mb=TINY_BUCKETS)
    optimizer = torch.optim.SGD(plain[4].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            model.optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
            optimizer.add_param_group({"params": plain[0].parameters(), "lr": 0.01})
        model(batch(step)).square().mean().backward()
        plain(batch(step)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
    for key, wanted in plain.state_dict().items():
        assert torch.equal(module.state_dict()[key], wanted), key

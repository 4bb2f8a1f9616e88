"""Post-accumulate hooks that the owner registers before or after wrapping find every gradient, as in plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from replicas import NormalisedNet
from torch import nn

from gossip import GossipDataParallel, GossipError

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CAPS = (1 / 2**20, 100 / 2**20, 200 / 2**20, 25)  # MiB, from a bucket for each parameter to one for all
MODES: dict[str, dict[str, Any]] = {
    "in backward": {},
    "clip bucket": {"clip_grad_norm": 0.1, "clip": "bucket"},
    "clip global": {"clip_grad_norm": 0.1},
    "outside": {"step_in_backward": False},
}
Seen = dict[str, torch.Tensor | None]


def make_module() -> NormalisedNet:
    torch.manual_seed(0)
    return NormalisedNet()


def backward(module: nn.Module, step: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    module(torch.randn(8, 4, generator=generator)).square().mean().backward()


def watch(module: nn.Module, seen: Seen) -> list[Any]:
    """Note the gradients that hooks find, by parameter; the hooks' handles."""

    def hook(name: str, parameter: torch.Tensor) -> None:
        seen[name] = None if parameter.grad is None else parameter.grad.clone()

    return [
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def finish(model: GossipDataParallel) -> None:
    if not model._arguments.step_in_backward:
        model.optimizer.step()
        model.optimizer.zero_grad()


def assert_found(seen: Seen, wanted: Seen) -> None:
    assert seen.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert seen[name] is not None, f"{name} had no gradient"
        assert torch.equal(seen[name], gradient), name


@pytest.mark.parametrize("bucket_cap_mb", CAPS)
@pytest.mark.parametrize("mode", MODES)
def test_hooks_find_every_gradient_whenever_they_were_registered(mode: str, bucket_cap_mb: float) -> None:
    """Before wrapping, after it, and after others were removed."""
    module = make_module()
    early: Seen = {}
    watch(module, early)
    model = GossipDataParallel(module, SGD, bucket_cap_mb=bucket_cap_mb, **MODES[mode])
    late: Seen = {}
    handles: list[Any] = []
    for step in range(4):
        early.clear()
        late.clear()
        plain, wanted = make_module(), {}
        plain.load_state_dict(model.state_dict())
        watch(plain, wanted)
        backward(plain, step)
        if step == 2:
            for handle in handles:
                handle.remove()
        if step in (0, 3):
            handles = watch(module, late)
        backward(model, step)
        finish(model)
        assert_found(early, wanted)
        assert_found(late, {} if step == 2 else wanted)
    assert model.step == 4
    model.close()


def train(mode: str, bucket_cap_mb: float, with_hooks: bool) -> list[torch.Tensor]:
    model = GossipDataParallel(make_module(), SGD, "ring", bucket_cap_mb=bucket_cap_mb, **MODES[mode])
    if with_hooks:
        watch(model, {})
    for step in range(4):
        backward(model, step, model.rank)
        finish(model)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    model.close()
    return values


def train_with_and_without_hooks() -> None:
    for mode in MODES:
        for bucket_cap_mb in CAPS:
            with_hooks = train(mode, bucket_cap_mb, with_hooks=True)
            assert all(map(torch.equal, with_hooks, train(mode, bucket_cap_mb, with_hooks=False))), mode


def test_hooks_that_only_look_change_no_bit() -> None:
    run_ranks(train_with_and_without_hooks, world_size=2)


def test_accumulated_gradients_are_found_too() -> None:
    plain, module = make_module(), make_module()
    wanted: Seen = {}
    seen: Seen = {}
    watch(plain, wanted)
    model = GossipDataParallel(module, SGD, bucket_cap_mb=CAPS[0])
    watch(module, seen)
    with model.no_sync():
        backward(model, 0)
    backward(plain, 0)
    assert_found(seen, wanted)
    for each in (plain, model):
        backward(each, 1)
    assert_found(seen, wanted)
    assert model.step == 1
    model.close()


def launched_at_each_hook(hooks_later: bool) -> list[int]:
    """How many of four buckets, each of one parameter, had been launched when hooks were called."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    counts: list[int] = []
    hook = lambda _: counts.append(model._engine._progress.num_launched)  # noqa: E731
    model = GossipDataParallel(module, SGD, bucket_cap_mb=CAPS[0])
    if hooks_later:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    inputs = torch.ones(1, 3, requires_grad=True)
    inputs.register_hook(hook)  # its gradient is the last
    model(inputs + 1).sum().backward()
    assert model.step == 1
    model.close()
    return counts


def test_buckets_are_launched_in_backward_whether_or_not_hooks_follow() -> None:
    assert launched_at_each_hook(hooks_later=False) == [4]
    assert launched_at_each_hook(hooks_later=True) == [0, 1, 2, 3, 3]


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("bucket_cap_mb", CAPS)
def test_gradients_that_hooks_change_are_what_is_applied(bucket_cap_mb: float) -> None:
    plain, module = make_module(), make_module()
    model = GossipDataParallel(module, SGD, bucket_cap_mb=bucket_cap_mb)
    for each in (plain, module):
        for parameter in each.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(halve)
    optimizer = SGD(plain.parameters())
    for step in range(3):
        backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, step)
    for actual, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, wanted)
    model.close()


def test_late_gradient_is_refused_where_hooks_follow() -> None:
    """Two inner backward passes give the same weight gradients, the second after its bucket was withheld."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (self.layer, self.layer, self.other):
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            return x

    module = Twice()
    model = GossipDataParallel(module, SGD, bucket_cap_mb=CAPS[0])
    watch(module, {})
    with pytest.raises(GossipError, match="received a gradient after its bucket had been updated"):
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()

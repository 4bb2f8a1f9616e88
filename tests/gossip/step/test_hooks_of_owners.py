"""Post-accumulate hooks that the owner registers before or after wrapping find every gradient, as in plain PyTorch."""

import functools
from typing import Any

import pytest
import torch
from replicas import SGD, NormalisedNet
from small_runs import finish
from torch import nn

from gossip import GossipDataParallel, GossipError

CAPS = (1 / 2**20, 100 / 2**20, 25)  # MiB, from a bucket for each parameter to one for all
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


def backward(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
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


def test_late_gradient_is_refused_where_hooks_follow() -> None:
    """Two inner backward passes give the same weight gradients, the second after its bucket was withheld."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = (nn.Linear(3, 3, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (self.layer, self.layer, self.other):
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            return x

    module = Twice()
    model = GossipDataParallel(module, SGD, bucket_cap_mb=CAPS[0])
    watch(module, {})
    with pytest.raises(GossipError, match="received a gradient after its bucket had been updated"):
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()

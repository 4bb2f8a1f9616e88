"""Virtual workers clip each replica's gradients, and leave out what is not finite."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from separate import ADAM, Separate, assert_same, batch, make_module, make_workers, train, train_both, trained_alike
from torch import nn

from gossip import GossipError


def clip_all(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def clip_each(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            nn.utils.clip_grad_norm_([parameter], 0.05)


@pytest.mark.parametrize(("clip", "reference"), [("global", clip_all), ("bucket", clip_each)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clipping_equals_torchs(dtype: torch.dtype, clip: str, reference: Callable[[nn.Module], object]) -> None:
    sizes = torch.tensor([10.0, 1e-3, 1.0]).repeat_interleave(2)[:, None].to(dtype)
    trained_alike(
        make_module().to(dtype),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        inputs=lambda step: batch(6, seed=step).to(dtype) * sizes,
        atol={torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype],
        clip_separate=reference,
        clip_grad_norm=0.05,
        clip=clip,
        bucket_cap_mb=1e-6,  # a bucket for every parameter
    )


@pytest.mark.parametrize("clipping", [{}, {"clip_grad_norm": 1e9}, {"clip_grad_norm": 1e9, "clip": "bucket"}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_not_applied(value: float, clipping: dict[str, Any]) -> None:
    module = make_module()
    workers, separate = make_workers(module, 3, ADAM, **clipping), Separate(module, 3, ADAM)
    train_both(workers, separate, batch(6))
    inputs = batch(6, seed=1)
    inputs[2:4] = value
    train(workers, inputs)
    separate.backward(inputs)
    separate.update((0, 2))
    assert_same(workers, separate)
    stats = workers.stats()
    assert (stats.step, stats.num_skipped, stats.num_refused) == (1, 1, 0)


def test_one_bad_bucket_leaves_the_others() -> None:
    """As the wrapper, which updates bucket by bucket."""
    module = make_module()
    workers = make_workers(module, 2, bucket_cap_mb=1e-6)
    before = {name: each.detach().clone() for name, each in workers.named_parameters()}
    (name, stack), *_ = workers.named_parameters()
    stack.register_hook(lambda gradient: torch.where(torch.arange(2).view(2, 1, 1) == 1, math.inf, gradient))
    train(workers, batch(4))
    for other, values in workers.named_parameters():
        changed = (values != before[other]).flatten(1).any(1).tolist()
        assert changed == ([True, False] if other == name else [True, True]), other


def test_messages_that_are_not_finite_are_refused_and_a_spoilt_replica_is_an_error() -> None:
    workers = make_workers(make_module(), 4, topology="directed_ring")
    train(workers, batch(8))
    with torch.no_grad():
        next(workers.parameters())[2] = math.nan
    train(workers, batch(8))  # the message that is mixed now left before
    with pytest.raises(GossipError, match=r"rank 2: step 2, bucket .*its own parameters are corrupted"):
        train(workers, batch(8))

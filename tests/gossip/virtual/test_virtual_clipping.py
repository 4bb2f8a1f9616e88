"""Virtual workers clip each replica's gradients, and leave out what is not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from separate import ADAM, Separate, assert_same, batch, make_module, make_workers, stacked, train, trained_alike
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


def test_parameters_of_several_dtypes_are_clipped_together() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 2))
    module[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    trained_alike(module, atol=1e-6, clip_separate=clip_all, clip_grad_norm=0.05)


@pytest.mark.parametrize("clipping", [{}, {"clip_grad_norm": 1e9}, {"clip_grad_norm": 1e9, "clip": "bucket"}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_not_applied(value: float, clipping: dict[str, Any]) -> None:
    module = make_module()
    workers, separate = make_workers(module, 3, ADAM, **clipping), Separate(module, 3, ADAM)
    train(workers, batch(6))
    separate.train(batch(6))
    inputs = batch(6, seed=1)
    inputs[2:4] = value
    train(workers, inputs)
    separate.backward(inputs)
    separate.update((0, 2))
    assert_same(workers, separate)
    stats = workers.stats()
    assert stats is not None
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


def test_a_spoilt_message_is_mixed_by_nobody() -> None:
    workers = make_workers(make_module(), 4, topology="directed_ring", optimizer=None)
    good = stacked(workers)["0.weight"]
    with torch.no_grad():
        workers.parameters().__next__()[2] = math.nan
    workers.idle_step()
    with torch.no_grad():
        next(workers.parameters())[2] = good[2]  # repaired in time
    workers.idle_step()
    assert torch.equal(stacked(workers)["0.weight"], good)
    stats = workers.stats()
    assert stats is not None
    assert stats.num_refused == 2, "the one who reads it, and the one whose own it is"


def test_sixteen_bad_steps_in_a_row_are_an_error() -> None:
    workers = make_workers(make_module(), 3)
    spoilt = batch(6)
    spoilt[:2] = math.nan
    for _ in range(10):
        train(workers, spoilt)
    train(workers, batch(6))
    for _ in range(15):
        train(workers, spoilt)
    with pytest.raises(GossipError, match=r"rank 0: step 26: .* 16 consecutive steps"):
        train(workers, spoilt)

"""Gradients that a loop over a sharded module accumulates, by the switches of ``fully_shard`` and by ``no_sync()``."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_loops import ADAMW, assert_trains_as_by_hand, batches, groups_and_ranks, loop_over, make_mesh
from sharded_models import values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gossip import GossipDataParallel
from gossip.private_torch import fsdp_modules

NUM_STEPS = 3
NUM_BATCHES = 3  # per step

WAYS = ("sync", "last backward", "resharded late", "resharded never", "no_sync", "both", "sync and no_sync in turn")


def make_module(mesh: Any, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 6))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh["shard"], **options)
    return fully_shard(module, mesh=mesh["shard"], **options)


def set_switches(module: Any, way: str, number: int) -> None:
    """Before one of a step's batches."""
    is_last = number == NUM_BATCHES - 1
    if way in ("sync", "last backward", "resharded late", "resharded never", "both") or (
        way.endswith("turn") and number != 1
    ):
        module.set_requires_gradient_sync(is_last or (way.endswith("turn") and number != 0))
    if way == "last backward":
        module.set_is_last_backward(is_last)
    if way == "resharded late":
        module.set_reshard_after_backward(is_last)
    if way == "resharded never":
        module.set_reshard_after_backward(False)


def pausing(model: nn.Module, way: str, number: int) -> contextlib.AbstractContextManager[None]:
    if not isinstance(model, GossipDataParallel) or number == NUM_BATCHES - 1:
        return contextlib.nullcontext()
    pauses = way in ("no_sync", "both") or (way.endswith("turn") and number == 1)
    return model.no_sync() if pauses else contextlib.nullcontext()


def reshard(module: nn.Module) -> None:
    for part in fsdp_modules(module):
        part.reshard()


def accumulate(by_hand: bool, way: str, options: dict[str, Any]) -> torch.Tensor:
    mesh = make_mesh(1, 2)
    module = make_module(mesh, **options)
    data = batches(NUM_STEPS * NUM_BATCHES, 3, 6)
    with loop_over(module, mesh, by_hand=by_hand, bucket_cap_mb=1e-4) as (model, end_step):
        for step in range(NUM_STEPS):
            for number in range(NUM_BATCHES):
                set_switches(module, way, number)
                x = data[step * NUM_BATCHES + number]
                with pausing(model, way, number):
                    (nn.functional.mse_loss(model(x).float(), x.flip(1)) / NUM_BATCHES).backward()
                if not by_hand:
                    assert model.step == step + (number == NUM_BATCHES - 1)
            end_step()
            if by_hand:  # it would go on with what was gathered before
                reshard(module)
        reshard(module)
        return values_of(module)


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@pytest.mark.parametrize(("way", "options"), list(zip(WAYS, itertools.cycle(OPTIONS), strict=False)))
def test_accumulated_gradients_make_one_step_as_by_hand_bit_for_bit(way: str, options: str) -> None:
    assert_trains_as_by_hand(accumulate, way, OPTIONS[options], world_size=2)


def exchange_what_was_accumulated(is_sharded: bool) -> tuple[torch.Tensor, int]:
    """Two groups of two, or two ranks that see what a group sees; and how many bytes the last step sent."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    mesh = make_mesh(2, 2) if is_sharded else None
    if mesh is not None:
        fully_shard(module, mesh=mesh["shard"])
    rank = dist.get_rank()
    with GossipDataParallel(module, ADAMW, "ring", mesh=mesh, clip_grad_norm=0.1) as model:
        for step in range(NUM_STEPS):
            for number in range(NUM_BATCHES):
                generator = torch.Generator().manual_seed(100 * step + 10 * number + model.rank)
                x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
                is_last = number == NUM_BATCHES - 1
                if is_sharded:
                    x = x[rank % 2 :: 2]
                    module.set_requires_gradient_sync(is_last)
                with contextlib.nullcontext() if is_last or is_sharded else model.no_sync():
                    nn.functional.mse_loss(model(x), x.flip(1)).backward()
        stats = model.stats()
        assert stats is not None
        return values_of(module), stats.bytes_sent


def test_groups_exchange_once_for_all_that_was_accumulated() -> None:
    for (values, sent_bytes), (wanted, all_bytes) in groups_and_ranks(exchange_what_was_accumulated):
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-12)
        assert 2 * sent_bytes == all_bytes

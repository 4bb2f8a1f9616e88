"""Gradients that a loop over a sharded module accumulates, by the switches of ``fully_shard`` and by ``no_sync()``."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from sharded_loops import assert_trains_as_by_hand, batches, loop_over, make_mesh
from sharded_models import values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gossip import GossipDataParallel
from gossip.private_torch import fsdp_modules

NUM_STEPS = 3
NUM_BATCHES = 3  # per step

WAYS = ("sync", "resharded late", "no_sync", "sync and no_sync in turn")


def make_module(mesh: Any, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 6))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh["shard"], **options)
    return fully_shard(module, mesh=mesh["shard"], **options)


def set_switches(module: Any, way: str, number: int) -> None:
    """Before one of a step's batches."""
    is_last = number == NUM_BATCHES - 1
    if way in ("sync", "resharded late") or (way.endswith("turn") and number != 1):
        module.set_requires_gradient_sync(is_last or (way.endswith("turn") and number != 0))
    if way == "resharded late":
        module.set_reshard_after_backward(is_last)


def pausing(model: nn.Module, way: str, number: int) -> contextlib.AbstractContextManager[None]:
    if not isinstance(model, GossipDataParallel) or number == NUM_BATCHES - 1:
        return contextlib.nullcontext()
    pauses = way == "no_sync" or (way.endswith("turn") and number == 1)
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

"""Ranks that each have the whole replica and send a part of it: what one of them cannot use, none of them uses."""

import contextlib
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_models import make_mesh
from torch import nn

from gossip import GossipDataParallel, GossipError
from gossip.sharding.local_group import ReplicaGroup, part_of

SGD = partial(torch.optim.SGD, lr=0.0)
NUMEL = 12


def test_parts_make_up_a_bucket() -> None:
    for numel in range(10):
        for num_parts in range(1, 12):
            parts = [range(numel)[part_of(numel, place, num_parts)] for place in range(num_parts)]
            assert [index for part in parts for index in part] == list(range(numel))


def test_the_mean_of_gradients_says_whose_it_is() -> None:
    module, world = nn.Linear(2, 3), Mock(rank=0, world_size=2, is_alone=False)
    ReplicaGroup(module, world).reduce_(module.parameters(), step=4, index=7)
    (_, what), _ = world.sum_.call_args
    assert what.startswith("step 4, bucket 7:")


def exchange_what_is_not_finite(place: int, compression: str | None) -> tuple[torch.Tensor, int, bool]:
    """The second group's message is not finite in the part that its rank at ``place`` sends."""
    mesh = make_mesh(2, 2)
    module = nn.Linear(NUMEL, 1, bias=False)
    group, refused, has_failed = dist.get_rank() // 2, 0, False
    model = GossipDataParallel(module, SGD, "ring", mesh=mesh, shard="none", compression=compression)
    for step in range(3):
        if group == 1 and step == 1:
            with torch.no_grad():
                module.weight[0, part_of(NUMEL, place, 2)] = math.nan
        try:
            module(torch.ones(1, NUMEL)).sum().mul(0.0).backward()
        except GossipError:
            has_failed = True
            break
        refused += model.stats().num_refused
    values = module.weight.detach().clone()
    with contextlib.suppress(GossipError):  # the second group has sent nothing since
        model.close()
    return values, refused, has_failed


@pytest.mark.parametrize(("place", "compression"), [(0, "int8"), (1, None)])
def test_all_ranks_of_a_group_refuse_a_part_that_is_not_finite(place: int, compression: str | None) -> None:
    first, second, *others = run_ranks(exchange_what_is_not_finite, place, compression, world_size=4)
    assert first[1] == second[1] == 1
    assert torch.isfinite(first[0]).all()
    assert torch.equal(first[0], second[0])
    assert all(has_failed for _, _, has_failed in others), "what they sent was not finite"

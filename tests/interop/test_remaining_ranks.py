"""torch.distributed's functions on the default group, as libraries call them, where ranks can be lost."""

import functools
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unsupervised

from gossip import GossipDataParallel, GossipError
from gossip.integrations.remaining_ranks import RemainingRanks, remaining_ranks

OPTIONS = {"on_peer_loss": "continue", "timeout": unsupervised._TIMEOUT}
WORLD_SIZE = 4


def found() -> dict[str, Any]:
    """What each function gives, of values that tell the ranks apart."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([[float(rank + 1), 1.0]])
    results: dict[str, Any] = {"rank": rank, "size": size}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        dist.all_reduce(value := own.clone(), getattr(dist.ReduceOp, op), async_op=False)
        results[op] = value.tolist()
    work = dist.all_reduce(value := own.clone().bfloat16(), group=dist.group.WORLD, async_op=True)
    assert work.wait()
    results["bfloat16"] = value.tolist()
    dist.reduce(value := own.clone(), 0)
    results["reduce"] = value.tolist()
    dist.broadcast(value := own.clone(), src=1)
    results["broadcast"] = value.tolist()
    dist.broadcast_object_list(objects := [rank, None], group_src=size - 1)
    results["broadcast_object_list"] = objects
    dist.all_gather(tensors := [torch.empty_like(own)] * WORLD_SIZE, own)
    results["all_gather"] = torch.cat(tensors).tolist()
    dist.all_gather_into_tensor(flat := torch.empty(WORLD_SIZE * own.numel()), own)
    results["all_gather_into_tensor"] = flat.tolist()
    dist.all_gather_object(objects := [None] * WORLD_SIZE, {"rank": rank})
    results["all_gather_object"] = objects
    dist.gather_object(rank, gathered := [None] * WORLD_SIZE if rank == 0 else None)
    results["gather_object"] = gathered
    dist.barrier()
    dist.broadcast(torch.empty(0), 0)
    return results


def expected(size: int, rank: int) -> dict[str, Any]:
    rows = torch.tensor([[float(each + 1), 1.0] for each in range(size)])
    return {
        "rank": rank,
        "size": size,
        "SUM": rows.sum(0, keepdim=True).tolist(),
        "AVG": rows.mean(0, keepdim=True).tolist(),
        "MAX": rows[-1:].tolist(),
        "MIN": rows[:1].tolist(),
        "PRODUCT": rows.prod(0, keepdim=True).tolist(),
        "bfloat16": rows.sum(0, keepdim=True).tolist(),
        "reduce": rows.sum(0, keepdim=True).tolist(),
        "broadcast": rows[1:2].tolist(),
        "broadcast_object_list": [size - 1, None],
        "all_gather": rows.tolist(),
        "all_gather_into_tensor": rows.view(-1).tolist(),
        "all_gather_object": [{"rank": each} for each in range(size)],
        "gather_object": list(range(size)) if rank == 0 else None,
    }


def lose(while_training: bool) -> tuple[int, list[dict[str, Any]]]:
    """Rank 1 is killed, between two calls of its own, or in training."""
    owner, rank, changes = SimpleNamespace(), dist.get_rank(), []
    before = dist.barrier
    remaining = remaining_ranks(owner, OPTIONS, lambda *change: changes.append(change))
    assert isinstance(remaining, RemainingRanks)
    results = [found()]
    model = None
    if while_training:
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        model = GossipDataParallel(torch.nn.Linear(2, 1), sgd, "ring", **OPTIONS)  # type: ignore[arg-type]
        remaining.use(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while model is not None and len(model.members) == WORLD_SIZE:
        model(torch.ones(1, 2)).sum().backward()
    results.append(found())
    if model is not None:
        model.close()
        results.append(found())
    assert changes == [(rank - (rank > 1), WORLD_SIZE - 1)]
    with pytest.raises(GossipError, match=r"of 4 these are lost: 1; start all of them again"):
        remaining.check_complete()
    with pytest.raises(GossipError, match="src=3, but 3 ranks remain"):
        dist.broadcast(torch.ones(1), 3)
    with pytest.raises(GossipError, match=r"a rank passes a tensor of 8 bytes, and this one of 4|of 4 bytes, and .* 8"):
        dist.all_gather([], torch.ones(2 if rank == 0 else 1))
    with pytest.raises(GossipError, match="op must be SUM, AVG, MIN, MAX or PRODUCT"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
    remaining.barrier()
    del owner
    assert dist.barrier is before
    return rank - (rank > 1), results


@pytest.mark.parametrize("while_training", [False, True])
def test_those_that_remain_do_what_all_are_asked_to(while_training: bool) -> None:
    told = unsupervised.results_of(lose, while_training, world_size=WORLD_SIZE, silent={1})
    for rank, (whole, *others) in [each for each in told if each is not None]:
        assert whole == expected(WORLD_SIZE, rank + (rank > 0))
        assert others == [expected(WORLD_SIZE - 1, rank)] * (1 + while_training)


def pass_on(_: Callable[..., Any] | None = None) -> None:
    """A group of some of the ranks is torch's."""
    owner = SimpleNamespace()
    with pytest.raises(ValueError, match="mesh cannot be combined with"):
        remaining_ranks(owner, {**OPTIONS, "mesh": object()}, lambda *_: None)
    part = dist.new_group([0, 1])
    remaining = remaining_ranks(owner, OPTIONS, lambda *_: None)
    if dist.get_rank() < 2:
        dist.all_reduce(value := torch.ones(1), group=part)
        assert (value.item(), dist.get_world_size(part)) == (2.0, 2)
    remaining.barrier()


def test_groups_of_some_ranks_are_left_alone() -> None:
    unsupervised.results_of(pass_on, world_size=3)

"""The same loop over a sharded module twice: by hand and by gossip, or by groups and by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gossip import GossipDataParallel

ADAMW = partial(torch.optim.AdamW, lr=0.01)

Loop = tuple[nn.Module, Callable[[], None]]
"""What a loop calls, and what ends a step."""


def make_mesh(num_groups: int, ranks_per_group: int) -> DeviceMesh:
    """Return a mesh of consecutive ranks. Collective."""
    return init_device_mesh("cpu", (num_groups, ranks_per_group), mesh_dim_names=("gossip", "shard"))


@contextmanager
def loop_over(module: nn.Module, mesh: DeviceMesh, *, by_hand: bool, **options: Any) -> Iterator[Loop]:
    """Train a sharded module by an optimizer over its DTensors, or by a model whose backward passes make the steps."""
    if not by_hand:
        with GossipDataParallel(module, ADAMW, "ring", mesh=mesh, **options) as model:
            yield model, lambda: None
        return
    optimizer = ADAMW([parameter for parameter in module.parameters() if parameter.requires_grad])

    def end_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    yield module, end_step


def batches(num_steps: int, *shape: int) -> list[torch.Tensor]:
    """Of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(*shape, generator=generator) for _ in range(num_steps)]


def assert_trains_as_by_hand(train: Callable[..., torch.Tensor], *args: Any, world_size: int) -> None:
    """``train(by_hand, *args)`` returns the same bits on all ranks of a group, by hand or not."""
    outcomes = run_ranks(_train_both_ways, train, args, world_size=world_size)
    wanted, _ = outcomes[0]
    for _, found in outcomes:
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def _train_both_ways(train: Callable[..., torch.Tensor], args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return train(True, *args), train(False, *args)


def groups_and_ranks(train: Callable[..., Any], *args: Any) -> list[tuple[Any, Any]]:
    """By rank what ``train(True, *args)`` returns in two groups of two, and ``train(False, *args)`` on two ranks.

    The second is that of the rank that sees what the group of the first sees.
    """
    wanted = run_ranks(train, False, *args, world_size=2)
    return [(found, wanted[rank // 2]) for rank, found in enumerate(run_ranks(train, True, *args, world_size=4))]

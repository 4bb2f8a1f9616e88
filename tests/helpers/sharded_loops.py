"""The same loop over a sharded module twice: by hand, and by gossip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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

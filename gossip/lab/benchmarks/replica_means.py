"""Means over the replicas of the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def average_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their means over the ranks of a group, by default all ranks, in place. Collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def average_module_(module: nn.Module) -> None:
    """Replace the parameters and float buffers of a replica by their means over the ranks, in place. Collective."""
    average_(_averaged_tensors(module))


@contextlib.contextmanager
def averaged(module: nn.Module, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Hold the mean of all replicas within the block, and restore the replica's own values afterwards. Collective.

    The replicas of the ranks of ``group``, or their shards of replicas, are averaged; by default those of all ranks.
    """
    tensors = _averaged_tensors(module)
    saved = [tensor.clone() for tensor in tensors]
    average_(tensors, group)
    try:
        yield
    finally:
        for tensor, values in zip(tensors, saved, strict=True):
            tensor.copy_(values)


def _averaged_tensors(module: nn.Module) -> list[torch.Tensor]:
    tensors = [tensor.data for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

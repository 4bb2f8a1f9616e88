"""The mean of the ranks' replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn


def average_(tensors: Sequence[torch.Tensor], world_size: int) -> None:
    """Replace tensors by their means over the ranks, in place. Collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= world_size
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def average_module_(module: nn.Module) -> None:
    """Replace the parameters and float buffers of a replica by their means over the ranks, in place. Collective."""
    average_(_averaged_tensors(module), dist.get_world_size())


@contextlib.contextmanager
def averaged(module: nn.Module) -> Iterator[None]:
    """Within the block a replica holds the mean of all; afterwards its own values again. Collective."""
    tensors = _averaged_tensors(module)
    saved = [tensor.clone() for tensor in tensors]
    average_(tensors, dist.get_world_size())
    try:
        yield
    finally:
        for tensor, values in zip(tensors, saved, strict=True):
            tensor.copy_(values)


def _averaged_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.data for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]

"""Ranks that each train and exchange a part of one replica."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from gossip.communication.world import World
from gossip.sharding.local_group import LocalGroup

_CHUNK_BYTES = 16 * 2**20


class PartitionedGroup(LocalGroup):
    """A group whose ranks each have a shard of gradients, optimizer state and messages.

    Parameters
    ----------
    module, replica : Module
        The module that is wrapped, and this rank's shard of it.
    world : World
        The ranks of the group.
    """

    def __init__(self, module: nn.Module, replica: nn.Module, world: World) -> None:
        super().__init__(module, replica, world)
        self.num_shards, self.place = world.world_size, world.rank

    def norm(self, norm: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        if not order > 0:
            raise ValueError(
                f"norm_type must be a positive number or inf with mesh, got {order}: the norm is that of what the "
                "ranks of a group have together"
            )
        if self.world.is_alone:
            return norm
        if order == math.inf:
            norms = self.world.gather_bytes(norm.to(torch.float64).cpu().numpy().tobytes(), "the norm of all gradients")
            largest = torch.stack([torch.frombuffer(bytearray(each), dtype=torch.float64) for each in norms]).max()
            return largest.to(norm)
        power = norm.to(torch.float64) ** order
        self.world.sum_(power, "the norm of all gradients", holds_host=power.is_cpu)
        return (power ** (1.0 / order)).to(norm.dtype)

    def any(self, flag: bool) -> bool:
        if self.world.is_alone:
            return flag
        count = torch.tensor(float(flag))
        self.world.sum_(count, "agreeing within the shard group")
        return bool(count)

    def sums(self, values: Iterable[float], what: str) -> list[float]:
        summed = torch.tensor(list(values), dtype=torch.float64)
        self.world.sum_(summed, what)
        return summed.tolist()

    def gather(self, shard: torch.Tensor, dimension: int, length: int, what: str) -> torch.Tensor | None:
        """As described there; the other ranks hold a chunk of all shards at a time. Collective over the group."""
        flat = shard.detach().cpu().contiguous().view(-1)
        if self.world.is_alone:
            return shard.narrow(dimension, 0, length)
        is_first = self.world.rank == 0
        parts = [torch.empty_like(flat) for _ in range(self.world.world_size)] if is_first else []
        chunk = max(1, _CHUNK_BYTES // flat.itemsize)
        for start in range(0, flat.numel(), chunk):
            piece = flat[start : start + chunk]
            payloads = self.world.gather_bytes(bytes(piece.view(torch.uint8).numpy()), what)
            for part, payload in zip(parts, payloads, strict=False):
                values = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(flat.dtype)
                part[start : start + chunk].copy_(values)
        if not is_first:
            return None
        return torch.cat([part.view(shard.shape) for part in parts], dimension).narrow(dimension, 0, length)

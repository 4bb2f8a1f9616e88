"""Ranks of a node that each have the whole replica: gradients are averaged, and each sends its part of a bucket."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gossip.communication.world import World, accumulation_dtype
from gossip.compression.codec import Compression
from gossip.exchange.transport import Transport
from gossip.sharding.local_group import SharedGroup
from gossip.sharding.partitioned_messages import GatheringTransport, PartitionedCompression


class ReplicaGroup(SharedGroup):
    """A group whose ranks hold equal replicas and make equal updates, each from the group's mean gradient."""

    averages_gradients = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, module, world)

    def divided(self, compression: Compression) -> Compression:
        if self.world.is_alone:
            return compression
        return PartitionedCompression(compression, self.world.rank, self.world.world_size)

    def carried(self, transport: Transport | None) -> Transport | None:
        if transport is None or self.world.is_alone:
            return transport
        return GatheringTransport(transport, self.world, self.rows)

    @torch.no_grad()
    def reduce_(self, parameters: Iterable[nn.Parameter], step: int, index: int) -> None:
        parameters = list(parameters)
        if self.world.is_alone or not parameters:
            return
        dtype = max((accumulation_dtype(each.dtype) for each in parameters), key=lambda each: each.itemsize)
        num_values = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(num_values + len(parameters), dtype=dtype, device=parameters[0].device)
        *means, counts = flat.split([*[parameter.numel() for parameter in parameters], len(parameters)])
        has_all = True
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                has_all = False
            else:
                means[index].view(parameter.shape).copy_(parameter.grad)
                counts[index] = 1.0
        what = f"step {step}, bucket {index}: averaging gradients over the ranks of the group"
        self.world.sum_(flat, what, holds_host=flat.is_cpu)
        flat[:num_values].div_(self.world.world_size)
        is_found = [True] * len(parameters) if has_all else (counts > 0).tolist()
        for parameter, mean, found in zip(parameters, means, is_found, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view(parameter.shape))
            elif found:
                parameter.grad = torch.empty_like(parameter).copy_(mean.view(parameter.shape))

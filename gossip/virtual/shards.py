"""The replicas' parameters and buffers, stacked along a leading dimension of workers, on one or several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gossip.buckets import Bucket
from gossip.buffers import is_averaged


@dataclass(frozen=True, eq=False)
class Shard:
    """The replicas of some neighbouring ranks, k of them, on one device.

    Attributes
    ----------
    ranks : range
    device : torch.device
    parameters : mapping of str to Parameter, [k, *shape]
        By the bare module's names: views of ``blocks``.
    buffers : dict of str to Tensor, [k, *shape]
    blocks : tuple of Tensor, [k, numel]
        What is exchanged: one per bucket of parameters, then one per float buffer, if those are mixed.
    """

    ranks: range
    device: torch.device
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    blocks: tuple[torch.Tensor, ...]

    def rows(self, first: int, stop: int) -> slice:
        """The rows of the ranks from ``first`` to ``stop`` that are here."""
        start = min(max(first, self.ranks.start), self.ranks.stop)
        end = min(max(stop, start), self.ranks.stop)
        return slice(start - self.ranks.start, end - self.ranks.start)


def make_shards(
    module: nn.Module,
    buckets: Sequence[Bucket],
    world_size: int,
    devices: Sequence[torch.device],
    *,
    mixes_buffers: bool,
) -> tuple[Shard, ...]:
    """As many equal replicas of ``module`` as there are ranks, dealt evenly to the devices in the order of ranks.

    Parameters
    ----------
    module : Module
    buckets : sequence of Bucket
        Of its parameters; their layout becomes that of every row.
    world_size : int
    devices : sequence of torch.device
        At most as many as there are ranks; one may come several times.
    mixes_buffers : bool
        Whether float buffers are exchanged too.
    """
    shards = []
    for place, device in enumerate(devices):
        ranks = range(place * world_size // len(devices), (place + 1) * world_size // len(devices))
        blocks, parameters = [], {}
        for bucket in buckets:
            block = _repeated(bucket.block, len(ranks), device)
            blocks.append(block)
            for name, parameter, view in zip(
                bucket.names, bucket.parameters, stacked_views(bucket, block), strict=True
            ):
                parameters[name] = nn.Parameter(view, requires_grad=parameter.requires_grad)
        names = [name for name, _ in module.named_parameters()]
        buffers = {name: _repeated(buffer, len(ranks), device) for name, buffer in module.named_buffers()}
        if mixes_buffers:
            blocks += [_flat(buffer) for buffer in buffers.values() if is_averaged(buffer) and buffer.numel()]
        shards.append(Shard(ranks, device, {name: parameters[name] for name in names}, buffers, tuple(blocks)))
    return tuple(shards)


def stacked_views(bucket: Bucket, block: torch.Tensor) -> list[torch.Tensor]:
    """A block of rows in the layout of ``bucket``, [k, numel], as one view per parameter, [k, *shape]."""
    return [
        block.as_strided((len(block), *shape), (block.stride(0), *stride), offset)
        for shape, stride, offset in bucket.shape.views
    ]


@torch.no_grad()
def written(shards: Sequence[Shard]) -> None:
    """Tell autograd that the blocks were written."""
    for shard in shards:
        torch.autograd.graph.increment_version(list(shard.parameters.values()))


def rows_of(shards: Sequence[Shard], first: int, stop: int) -> Iterator[tuple[Shard, slice]]:
    """The shards that hold any of the ranks from ``first`` to ``stop``, each with the rows of those."""
    for shard in shards:
        rows = shard.rows(first, stop)
        if rows.stop > rows.start:
            yield shard, rows


def mean_of(stacks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Over all rows of all shards, on the first one's device."""
    wide = torch.promote_types(stacks[0].dtype, torch.float32)
    if len(stacks) == 1:
        return stacks[0].mean(0, dtype=wide).to(stacks[0].dtype)
    total = torch.stack([stack.sum(0, dtype=wide).to(stacks[0].device) for stack in stacks]).sum(0)
    return (total / sum(map(len, stacks))).to(stacks[0].dtype)


@torch.no_grad()
def load_into(
    module: nn.Module, shards: Sequence[Shard], choose: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> None:
    """Write into a bare module what ``choose`` makes of the stacks of each parameter and buffer."""
    for name, parameter in module.named_parameters():
        parameter.copy_(choose([shard.parameters[name].detach() for shard in shards]))
    for name, buffer in module.named_buffers():
        buffer.copy_(choose([shard.buffers[name] for shard in shards]))


def _repeated(values: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    return values.detach().to(device).expand(count, *values.shape).clone(memory_format=torch.contiguous_format)


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return values.view(len(buffer), -1)

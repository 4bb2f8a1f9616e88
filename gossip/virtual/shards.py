"""The replicas' parameters and buffers, stacked along a leading dimension of workers, on one or several devices."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import is_averaged
from gossip.parameters.digests import memory_order
from gossip.parameters.names import named_buffers, named_parameters


@dataclass(frozen=True, eq=False)
class Shard:
    """The k replicas of consecutive ranks, on one device.

    Parameters and buffers are stacked, [k, *shape], by the bare module's names; parameters that are exchanged are views
    of their bucket's rows.
    """

    ranks: range
    device: torch.device
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]


def make_shards(module: nn.Module, world_size: int, devices: Sequence[torch.device]) -> tuple[Shard, ...]:
    """Make one equal replica of ``module`` per rank, distributed evenly over the devices in the order of ranks.

    There is at most one device per rank; a device may occur several times.
    """
    shards = []
    for place, device in enumerate(devices):
        ranks = range(place * world_size // len(devices), (place + 1) * world_size // len(devices))
        parameters = {name: _stack(parameter, ranks, device) for name, parameter in named_parameters(module)}
        buffers = {name: _repeated(buffer, len(ranks), device) for name, buffer in named_buffers(module)}
        shards.append(Shard(ranks, device, parameters, buffers))
    return tuple(shards)


def deal_(stacks: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    """Write the values of all ranks, in order, into the shards' stacks."""
    first = 0
    with torch.no_grad():
        for stack in stacks:
            stack.copy_(torch.stack(list(rows[first : first + len(stack)])))
            first += len(stack)


@torch.no_grad()
def written(shards: Sequence[Shard]) -> None:
    """Tell autograd that the parameters were written."""
    for shard in shards:
        torch.autograd.graph.increment_version(list(shard.parameters.values()))


def rows_of(shards: Sequence[Shard], first: int, stop: int) -> Iterator[tuple[Shard, slice]]:
    """Yield the shards that hold any of the ranks from ``first`` to ``stop``, each with the rows of those."""
    for shard in shards:
        start, end = max(first, shard.ranks.start), min(stop, shard.ranks.stop)
        if start < end:
            yield shard, slice(start - shard.ranks.start, end - shard.ranks.start)


Weights = Mapping[str, Sequence[torch.Tensor]]
"""How much each row counts in a mean, by parameter, [k, 1] for each shard; equally where there is no entry."""


def mean_of(stacks: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """Return the mean over all rows of all shards, on the first shard's device."""
    wide = torch.promote_types(stacks[0].dtype, torch.float32)
    if weights is not None:
        mean_weight = sum(float(weight.sum()) for weight in weights) / sum(map(len, stacks))
        pairs = zip(stacks, weights, strict=True)
        stacks = [stack * (weight / mean_weight).view(-1, *[1] * (stack.dim() - 1)).to(wide) for stack, weight in pairs]
    if len(stacks) == 1:
        return stacks[0].mean(0, dtype=wide).to(stacks[0].dtype)
    total = torch.stack([stack.sum(0, dtype=wide).to(stacks[0].device) for stack in stacks]).sum(0)
    return (total / sum(map(len, stacks))).to(stacks[0].dtype)


def average_of(shards: Sequence[Shard], name: str, weights: Weights) -> torch.Tensor:
    """Return the mean over all replicas of a parameter or buffer; rank 0's values of one that has no mean."""
    is_parameter = name in shards[0].parameters
    stacks = [(shard.parameters if is_parameter else shard.buffers)[name].detach() for shard in shards]
    has_mean = is_mixable(stacks[0]) if is_parameter else is_averaged(stacks[0])
    return mean_of(stacks, weights.get(name)) if has_mean else stacks[0][0]


def distance_from_mean(shards: Sequence[Shard], weights: Weights, ranks: Sequence[int]) -> tuple[float, float]:
    """Return the root mean square distance of these replicas from their mean, and relative to the mean's norm."""
    square, mean_square = 0.0, 0.0
    for name in filter(lambda name: is_mixable(shards[0].parameters[name]), shards[0].parameters):
        stacks = [shard.parameters[name].detach() for shard in shards]
        mean = mean_of(stacks, weights.get(name)).to(stacks[0].dtype)
        mean_square += float(torch.linalg.vector_norm(mean, dtype=torch.float64)) ** 2
        for shard, stack in zip(shards, stacks, strict=True):
            own = stack[[rank - shard.ranks.start for rank in ranks if rank in shard.ranks]]
            square += float(torch.linalg.vector_norm(own - mean.to(stack), dtype=torch.float64)) ** 2
    distance = math.sqrt(square / len(ranks))
    return distance, distance / math.sqrt(mean_square) if mean_square else 0.0


@torch.no_grad()
def load_into(
    module: nn.Module, shards: Sequence[Shard], choose: Callable[[str, Sequence[torch.Tensor]], torch.Tensor]
) -> None:
    """Write into a bare module what ``choose`` returns for the name and the stacks of each parameter and buffer."""
    for name, parameter in named_parameters(module):
        parameter.copy_(choose(name, [shard.parameters[name].detach() for shard in shards]))
    for name, buffer in named_buffers(module):
        buffer.copy_(choose(name, [shard.buffers[name] for shard in shards]))


def _repeated(values: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    return values.detach().to(device).expand(count, *values.shape).clone(memory_format=torch.contiguous_format)


def _stack(parameter: nn.Parameter, ranks: range, device: torch.device) -> nn.Parameter:
    """Return the stack of a parameter, whose rows keep its order of dimensions in memory."""
    order = memory_order(parameter)
    rows = _repeated(parameter.permute(order), len(ranks), device)
    inverse = sorted(range(parameter.dim()), key=order.__getitem__)
    return nn.Parameter(rows.permute(0, *(1 + dim for dim in inverse)), requires_grad=parameter.requires_grad)

"""Ranks of a node that each have the whole replica: gradients are averaged, and each sends its part of a bucket.

Each gets the whole difference.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gossip.communication.world import World
from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.conversation import Arrival, Turns, accumulation_dtype
from gossip.sharding.local_group import SharedGroup
from gossip.sharding.shard_mesh import chunk_length
from topologies import Round, Topology

Gather = Callable[[torch.Tensor, str], Callable[[], None]]


class ReplicaGroup(SharedGroup):
    """A group whose ranks hold equal replicas and make equal updates, each from the group's mean gradient."""

    averages_gradients = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, module, world)

    def divided(self, compression: Compression) -> Compression:
        if self.world.is_alone:
            return compression
        return PartitionedCompression(compression, self.world.rank, self.world.world_size, self.rows.begin_gather)

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
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                has_all = False
            else:
                means[number].view(parameter.shape).copy_(parameter.grad)
                counts[number] = 1.0
        what = f"step {step}, bucket {index}: averaging gradients over the ranks of the group"
        self.world.sum_(flat, what, holds_host=flat.is_cpu)
        flat[:num_values].div_(self.world.world_size)
        is_found = [True] * len(parameters) if has_all else (counts > 0).tolist()
        for parameter, mean, found in zip(parameters, means, is_found, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view(parameter.shape))
            elif found:
                parameter.grad = torch.empty_like(parameter).copy_(mean.view(parameter.shape))


class PartitionedCompression(Compression):
    """Encodes one of several equal parts of each bucket, as another compression does; the last may be shorter.

    ``gather`` is :meth:`gossip.communication.row_collectives.RowCollectives.begin_gather` of the ranks that have them.
    """

    def __init__(self, compression: Compression, place: int, num_parts: int, gather: Gather) -> None:
        self._compression = compression
        self.place, self.num_parts, self.gather = place, num_parts, gather
        self.delivers = compression.delivers

    def check(self, topology: Topology) -> None:
        self._compression.check(topology)

    def codec(self, bucket: BucketShape, rank: int) -> Codec:
        start = bucket.start
        assert start is not None
        part = part_of(bucket.numel, self.place, self.num_parts)
        shape = BucketShape(bucket.index, start[part], memory=bucket.memory, start=start[part], clip=bucket.clip)
        return _PartCodec(self, self._compression.codec(shape, rank), part, bucket)

    def describe(self) -> str:
        return self._compression.describe()


class _PartCodec(Codec):
    """The codec of one part of a bucket; what has arrived of all parts is gathered.

    No exchange ends before its messages have arrived: what allows that cannot be combined with a mesh. No rank has the
    group's message as one tensor (:attr:`sent`).
    """

    def __init__(self, compression: PartitionedCompression, codec: Codec, part: slice, bucket: BucketShape) -> None:
        self._compression, self._codec, self._part, self._bucket = compression, codec, part, bucket
        self._step = 0

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        self._step = step
        return self._codec.turns(values[self._part], round_, step)

    def completed(self, arrival: Arrival) -> Arrival:
        bucket, parts = self._bucket, self._compression
        size = chunk_length(bucket.numel, parts.num_parts)
        rows = torch.zeros(parts.num_parts, size, dtype=bucket.accumulation_dtype, device=bucket.device)
        own = rows[parts.place]
        for part, difference in arrival.parts:
            own[part] = difference
        if not arrival.is_finite:
            own.fill_(torch.nan)  # all ranks of the group refuse it, or none
        what = f"step {self._step}, bucket {bucket.index}: gathering what arrived at the ranks of the group"
        parts.gather(rows, what)()
        return Arrival.of(rows.view(-1)[: bucket.numel])

    def state_dict(self) -> dict[str, Any]:
        return self._codec.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._codec.load_state_dict(state)


def part_of(numel: int, place: int, num_parts: int) -> slice:
    """Return which of a bucket's values make up a part; none if there are fewer values than parts."""
    size = chunk_length(numel, num_parts)
    return slice(min(place * size, numel), min((place + 1) * size, numel))

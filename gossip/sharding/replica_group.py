"""Ranks of a node that each have the whole replica: gradients are averaged, and each sends its part of a bucket.

Each gets the whole difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gossip.communication.row_collectives import RowCollectives
from gossip.communication.world import World, accumulation_dtype
from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.conversation import Arrival, Conversation, Turn, Turns
from gossip.exchange.transport import Exchange, Transport
from gossip.sharding.local_group import SharedGroup
from gossip.sharding.shard_mesh import chunk_length
from topologies import Round, Topology


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
    """Encodes one of several equal parts of each bucket, as another compression does; the last may be shorter."""

    def __init__(self, compression: Compression, place: int, num_parts: int) -> None:
        self._compression = compression
        self._place, self._num_parts = place, num_parts
        self.delivers = compression.delivers

    def check(self, topology: Topology) -> None:
        self._compression.check(topology)

    def codec(self, bucket: BucketShape, rank: int) -> Codec:
        start = bucket.start
        assert start is not None
        part = part_of(bucket.numel, self._place, self._num_parts)
        shape = BucketShape(bucket.index, start[part], memory=bucket.memory, start=start[part], clip=bucket.clip)
        return _PartCodec(self._compression.codec(shape, rank), part, bucket.numel)

    def describe(self) -> str:
        return self._compression.describe()


class _PartCodec(Codec):
    """The codec of one part of a bucket."""

    def __init__(self, codec: Codec, part: slice, numel: int) -> None:
        self._codec, self._part, self._numel = codec, part, numel

    @property
    def sent(self) -> None:
        """No rank has the group's message as one tensor."""
        return None

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        return self._codec.turns(values[self._part], round_, step)

    def begin(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        dtype = accumulation_dtype(values.dtype)
        return _PartConversation(self.turns(values, round_, step), self._numel, dtype, values.device)

    def state_dict(self) -> dict[str, Any]:
        return self._codec.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._codec.load_state_dict(state)


class _PartConversation(Conversation):
    """A conversation whose arrival is a part of a bucket's difference."""

    def __init__(self, turns: Turns, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        super().__init__(turns)


class GatheringTransport(Transport):
    """Carries messages as another transport does, and gathers what has arrived at the ranks of a group by ``rows``.

    No exchange ends before its messages have arrived: what allows that cannot be combined with a mesh.
    """

    def __init__(self, transport: Transport, world: World, rows: RowCollectives) -> None:
        self._transport, self._world, self._rows = transport, world, rows
        self.num_buffers = transport.num_buffers

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> Exchange:
        exchange = self._transport.start(conversation, round_, step=step, bucket=bucket)
        if not isinstance(conversation, _PartConversation):
            return exchange
        what = f"step {step}, bucket {bucket}: gathering what arrived at the ranks of the group"
        return _GatheredExchange(exchange, conversation, self._world, self._rows, what)

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        return self._transport.memory(message, step=step, bucket=bucket)

    def rehearse(self, turn: Turn, round_: Round, device: torch.device, *, alike: bool) -> Sequence[torch.Tensor]:
        return self._transport.rehearse(turn, round_, device, alike=alike)

    def held(self) -> Sequence[torch.Tensor]:
        return self._transport.held()

    def describe(self) -> str:
        return f"{self._transport.describe()}, a part of each bucket"


class _GatheredExchange(Exchange):
    """An exchange of one part, whose arrival is the whole difference."""

    def __init__(
        self, exchange: Exchange, conversation: _PartConversation, world: World, rows: RowCollectives, what: str
    ) -> None:
        self._exchange, self._conversation = exchange, conversation
        self._world, self._rows, self._what = world, rows, what

    @property
    def bytes_by_peer(self) -> Mapping[int, int]:
        return self._exchange.bytes_by_peer

    @property
    def arrived_at(self) -> Mapping[int, float]:
        return self._exchange.arrived_at

    def wait(self) -> Arrival:
        arrival, whole = self._exchange.wait(), self._conversation
        size = chunk_length(whole.numel, self._world.world_size)
        rows = torch.zeros(self._world.world_size, size, dtype=whole.dtype, device=whole.device)
        own = rows[self._world.rank]
        for part, difference in arrival.parts:
            own[part] = difference
        if not arrival.is_finite:
            own.fill_(torch.nan)  # all ranks of the group refuse it, or none
        self._rows.begin_gather(rows, self._what)()
        return Arrival.of(rows.view(-1)[: whole.numel])


def part_of(numel: int, place: int, num_parts: int) -> slice:
    """Return which of a bucket's values make up a part; none if there are fewer values than parts."""
    size = chunk_length(numel, num_parts)
    return slice(min(place * size, numel), min((place + 1) * size, numel))

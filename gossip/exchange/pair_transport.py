"""The transport for averages of pairs of ranks that do not make their steps together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gossip.compression.conversation import Arrival, Conversation, Turn, accumulation_dtype
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange.pair_averaging import PairAverager
from gossip.exchange.transport import LateDifference, Transport
from topologies import Round


class PairTransport(Transport):
    """Averages between the members of a generation, see ``gossip.exchange.pair_averaging``.

    An exchange asks for an average with the peer of a round; its result is what all averages have added to the bucket
    since the previous exchange, whoever asked for them.
    """

    def __init__(self, world: ElasticWorld, members: Sequence[int], averager: PairAverager, max_staleness: int) -> None:
        self._world, self.members = world, members
        self._place = members.index(world.member)
        self.averager, self.max_staleness = averager, max_staleness
        self._messages: dict[int, torch.Tensor] = {}

    def describe(self) -> str:
        return f"averages of two of {len(self.members)} ranks at a time, none of which waits for another's step"

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        del step
        memory = self._messages[bucket] = self.averager.memory(bucket, message)
        return memory

    def rehearse(self, turn: Turn, round_: Round, device: torch.device, *, alike: bool) -> Sequence[torch.Tensor]:
        del round_, alike
        message = next(iter(turn.sent.values()))
        wide = torch.empty(2, *message.shape, dtype=accumulation_dtype(message.dtype), device="meta")
        return message if device.type == "cpu" else torch.empty_like(message), torch.empty_like(message), wide

    def held(self) -> list[torch.Tensor]:
        return self.averager.held()

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> PairExchange:
        _ = conversation.opening  # makes the message
        place = next(iter(round_.peers(self._place)), None)
        partner = None if place is None else self.members[place]
        num_bytes = self.averager.show(bucket, self._messages[bucket], step, partner)
        self.averager.num_steps = step + 1
        exchange = PairExchange(self, step, bucket)
        if num_bytes and partner is not None:
            exchange.count(partner, num_bytes)
        return exchange

    def late(self, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
        """Yield, with ``waits``, what averages have added, once this rank has the reply to its own question."""
        if waits:
            self.averager.wait(bucket, latest_step=2**62)
            added = self.averager.take(bucket, self.averager.num_steps, is_read=True)
            if added is not None:
                yield LateDifference(0, added)

    def drop(self, bucket: int) -> None:
        self.averager.wait(bucket, latest_step=2**62)
        self.averager.hide(bucket)


class PairExchange:
    """What averages add to a bucket in a step, see :class:`gossip.Exchange`."""

    def __init__(self, transport: PairTransport, step: int, bucket: int) -> None:
        self.bytes_by_peer: dict[int, int] = {}
        self.arrived_at: dict[int, float] = {}
        self._averager, self._members = transport.averager, transport.members
        self._bucket, self._step, self._latest_step = bucket, step, step + 1 - transport.max_staleness

    def count(self, member: int, num_bytes: int) -> None:
        """Count what was sent to a member, if it still is one."""
        if member in self._members:
            place = self._members.index(member)
            self.bytes_by_peer[place] = self.bytes_by_peer.get(place, 0) + num_bytes

    def wait(self) -> Arrival:
        self._averager.wait(self._bucket, self._latest_step)
        for member, num_bytes in self._averager.answered(self._bucket).items():
            self.count(member, num_bytes)
        added = self._averager.take(self._bucket, self._step + 1)
        return Arrival(iter(()), is_finite=True) if added is None else Arrival.of(added)

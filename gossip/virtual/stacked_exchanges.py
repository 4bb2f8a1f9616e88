"""Rounds among replicas in one process: a sparse product for messages that are values, otherwise stacked codecs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gossip.algorithms import VALUES, Algorithm, Arrived, BucketView
from gossip.compression.codec import BucketShape, Codec, Compression, StackedArrival, StackedCodec
from gossip.compression.conversation import accumulation_dtype, all_finite, carry
from gossip.exchange.exchanges import CHANNEL_STRIDE, Accepted, Exchanges, InFlight, Outgoing, corrupted, row_sum
from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import BufferBucket, as_real
from gossip.virtual.mixing_products import known_rows, weighted_differences
from gossip.virtual.shards import Shard
from gossip.virtual.stacked_updating import StackedModel, StackedUpdater
from topologies import Round, Topology
from topologies.analysis.traffic import round_traffic


@dataclass
class StackedInFlight(InFlight):
    """A round of one block whose messages have been made but not combined."""

    stacks: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By channel and shard, what each replica is to add, [k, numel], in the accumulation dtype."""

    def differences(self) -> dict[str, list[torch.Tensor]]:
        return self.stacks


@dataclass
class StackedMeter:
    """The cost of one step of all replicas."""

    num_refused: torch.Tensor
    """The number of blocks whose messages each rank refused, [n], int64."""
    bytes_sent: float = 0.0
    """The mean over ranks; for a uniform group, the bytes of a ring all-reduce."""


class StackedExchanges(Exchanges[StackedInFlight, StackedMeter]):
    """The exchanges of all replicas at once."""

    def __init__(self, model: StackedModel, topology: Topology, algorithm: Algorithm, compression: Compression) -> None:
        super().__init__(model.optimizers, topology, algorithm, compression)
        self._shards, self._optimizers = model.shards, model.optimizers
        self._buckets: dict[int, Bucket] = {}  # by block
        self._views: list[list[BucketView]] = []
        self.codecs: dict[tuple[int, str], StackedCodec] = {}  # by block and channel, where messages are not values
        self._known_rows = known_rows(model.shards)
        self._blocks: list[tuple[Bucket | BufferBucket, list[int]]] = []  # by bucket of a rank
        self.add(model.buckets)
        for bucket in model.buffer_buckets:
            self._blocks.append((bucket, list(range(len(self.in_flight), len(self.in_flight) + len(bucket.names)))))
            for name in bucket.names:
                buffers = [as_real(shard.buffers[name]) for shard in model.shards]
                self._views.append([BucketView(buffer.view(len(buffer), -1)) for buffer in buffers])
                self.in_flight.append(None)

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Move these buckets' stacks into blocks, and exchange them from the round of this step on."""
        for bucket in buckets:
            index = len(self.in_flight)
            self.in_flight.append(None)
            self._buckets[index] = bucket
            self._blocks.append((bucket, [index]))
            self._views.append([self._make_view(shard, bucket) for shard in self._shards])
            for view in self._views[index]:
                self._begin(view)
            self._make_codecs(index)

    @torch.no_grad()
    def _make_view(self, shard: Shard, bucket: Bucket) -> BucketView:
        block = bucket.block.new_zeros(len(shard.ranks), bucket.block.numel(), device=shard.device)
        parameters = [shard.parameters[name] for name in bucket.names]
        for parameter, view in zip(parameters, bucket.views(block), strict=True):
            view.copy_(parameter)
            parameter.data = view
        return BucketView(block, parameters, bucket.views, self._optimizers, shard.ranks)

    def _make_codecs(self, index: int) -> None:
        """Make one codec per channel, except for messages that are values."""
        bucket, world_size = self._buckets[index], self._topology.world_size
        if world_size == 1 and not self.algorithm.reads_sent:
            return
        for number, channel in enumerate(self._channels(index)):
            stacks = [self._like(view, channel) for view in self._views[index]]
            compression = self._compression_of(index, channel)
            if compression.messages(stacks[0][:1]) is not None:
                continue
            rows = [row for stack in stacks for row in stack]
            place = bucket.index + CHANNEL_STRIDE * number
            shapes = [BucketShape(place, row, bucket.shape.views, start=row) for row in rows]
            stacked = compression.stacked_codec(shapes[0], world_size) if len(stacks) == 1 else None
            self.codecs[index, channel] = stacked or RankCodecs(
                [compression.codec(shape, rank) for rank, shape in enumerate(shapes)],
                decodes_all=self.algorithm.reads_sent,
            )

    @property
    def next_ranks(self) -> Sequence[int]:
        """The ranks that make the next step."""
        return range(self._topology.world_size)

    @property
    def averaged_ranks(self) -> list[int]:
        """The ranks whose mean averages are now."""
        return list(self.next_ranks)

    def begin_step(self, step: int, updater: StackedUpdater) -> None:
        """React to the beginning of a step."""

    def end_step(self, step: int, updater: StackedUpdater, meter: StackedMeter) -> Topology | None:
        """React to what happens before ``step``; return the topology from here on if it and the algorithm change."""
        del step, updater, meter
        return None

    # ------------------------------------------------------------------ hooks of the policy

    def views(self, index: int) -> Sequence[BucketView]:
        return self._views[index]

    def holds_parameters(self, index: int) -> bool:
        return index in self._buckets

    def _takes_part(self, step: int, round_: Round) -> bool:
        return not round_.is_identity or self.algorithm.steps_alone(step, round_)

    def _start(self, index: int, messages: Outgoing, round_: Round, step: int, meter: StackedMeter) -> StackedInFlight:
        in_flight = StackedInFlight(round_, step)
        for channel, blocks in messages.items():
            edges = self._edges(index, channel, round_, step)
            if (index, channel) in self.codecs:
                in_flight.stacks[channel], sent = self._converse(index, channel, blocks, edges, step, meter)
            else:
                compression = self._compression_of(index, channel)
                values = [message for block in blocks if (message := compression.messages(block)) is not None]
                wide = accumulation_dtype(blocks[0].dtype)
                in_flight.stacks[channel] = weighted_differences(edges, self._shards, values, wide, self._known_rows)
                sent = [message.clone() for message in values] if self._keeps_sent else []
                is_summed = values[0].dtype == blocks[0].dtype  # on the wire, in groups
                num_messages = round_traffic(edges).sent if is_summed else edges.num_targets()
                meter.bytes_sent += float(np.mean(num_messages)) * values[0][0].nbytes
            if self._keeps_sent:
                in_flight.sent[channel] = sent
        return in_flight

    def _accepted(self, index: int, in_flight: StackedInFlight, meter: StackedMeter) -> Accepted:
        self._show(index, in_flight)
        for number, (shard, view) in enumerate(zip(self._shards, self._views[index], strict=True)):
            differences = {channel: stacks[number] for channel, stacks in in_flight.stacks.items()}
            if not all(map(all_finite, differences.values())):
                is_finite = [difference.isfinite().all(1) for difference in differences.values()]
                refused = ~torch.stack(is_finite).all(0)
                not_finite = refused & ~view.values.isfinite().all(1)
                if bool(not_finite.any()):
                    rank = shard.ranks.start + int(not_finite.nonzero()[0])
                    raise corrupted(rank, index, in_flight.round_index)
                for difference in differences.values():
                    difference[refused] = 0
                meter.num_refused[shard.ranks.start : shard.ranks.stop] += refused.cpu()
            sent = {channel: stacks[number] for channel, stacks in in_flight.sent.items()}
            yield view, {channel: Arrived(difference, sent.get(channel)) for channel, difference in differences.items()}

    def _written(self, index: int) -> None:
        for view in self._views[index] if index in self._buckets else ():
            if any((index, channel) in self.codecs for channel in self._channels(index)):
                for gap in self._buckets[index].padding:
                    view.values[:, gap] = 0
            torch.autograd.graph.increment_version(view.parameters)

    def joined(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([stack.detach().cpu() for stack in rows])

    def names(self, index: int) -> Sequence[str]:
        return self._buckets[index].names

    def dealt(self, values: torch.Tensor) -> list[torch.Tensor]:
        rows = values.split([len(shard.ranks) for shard in self._shards])
        return [own.to(shard.device, copy=True) for shard, own in zip(self._shards, rows, strict=True)]

    # ------------------------------------------------------------------ saving

    @property
    def buckets(self) -> list[Bucket | BufferBucket]:
        """The buckets that a rank would have."""
        return [bucket for bucket, _ in self._blocks]

    def rank_states(self) -> Iterator[dict[str, Any]]:
        """Yield for each rank what :meth:`gossip.exchange.rank_exchanges.RankExchanges.state_dict` would return."""
        for number, shard in enumerate(self._shards):
            for row, rank in enumerate(shard.ranks):
                yield {
                    "in_flight": [self._in_flight_of(indices, number, row, rank) for _, indices in self._blocks],
                    "codecs": [self._codec_states(indices[0], rank) for _, indices in self._blocks],
                }

    def _in_flight_of(self, indices: Sequence[int], number: int, row: int, rank: int) -> dict[str, Any] | None:
        found = [block for index in indices if (block := self.in_flight[index]) is not None]
        in_flight = [block for block in found if self._is_in(block.round_index, block.round, rank)]
        if not in_flight:
            return None

        def joined(by_block: Sequence[Mapping[str, Sequence[torch.Tensor]]]) -> dict[str, torch.Tensor]:
            return {channel: torch.cat([block[channel][number][row] for block in by_block]) for channel in by_block[0]}

        return {
            "round": in_flight[0].round_index,
            "differences": joined([block.stacks for block in in_flight]),
            "sent": joined([block.sent for block in in_flight]),
        }

    def _codec_states(self, index: int, rank: int) -> dict[str, Any]:
        return {
            channel: self.codecs[index, channel].state_dict(rank) if (index, channel) in self.codecs else {}
            for channel in self._channels(index)
        }

    def load_rank_states(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Drop what is in flight and restore what was, by rank; None starts anew."""
        self.drop()
        if states is None:
            self.codecs = {}
            for index in self._buckets:
                self._make_codecs(index)
            return
        for place, (_, indices) in enumerate(self._blocks):
            saved = [state["in_flight"][place] for state in states]
            if any(saved):
                self._load_in_flight(indices, saved)
            for channel in self._channels(indices[0]):
                if (codec := self.codecs.get((indices[0], channel))) is not None:
                    codec.load_state_dicts([state["codecs"][place][channel] for state in states])

    def _load_in_flight(self, indices: Sequence[int], saved: Sequence[Mapping[str, Any] | None]) -> None:
        """Restore what a bucket had in flight on every rank; None for a rank that had no peer."""
        known = next(state for state in saved if state is not None)
        round_ = self._topology.round(known["round"])
        stacks: dict[str, list[list[torch.Tensor]]] = {}  # by channel and block
        for channel, like in known["differences"].items():
            rows = [torch.zeros_like(like) if state is None else state["differences"][channel] for state in saved]
            stacks[channel] = self._dealt_to_blocks(indices, torch.stack(rows))
        sent: list[list[torch.Tensor]] = []
        if self._keeps_sent and VALUES in known["sent"]:
            own = torch.cat([self.joined([view.values for view in self._views[index]]) for index in indices], -1)
            rows = [row if state is None else state["sent"][VALUES] for state, row in zip(saved, own, strict=True)]
            sent = self._dealt_to_blocks(indices, torch.stack(rows))
        for place, index in enumerate(indices):
            self.in_flight[index] = StackedInFlight(
                round_,
                known["round"],
                {VALUES: sent[place]} if sent else {},
                {channel: by_block[place] for channel, by_block in stacks.items()},
            )

    def _dealt_to_blocks(self, indices: Sequence[int], values: torch.Tensor) -> list[list[torch.Tensor]]:
        """Split a bucket's values of all ranks, [n, numel], by block and view."""
        if len(indices) == 1:
            return [self.dealt(values)]
        sizes = [self._views[index][0].values.shape[-1] for index in indices]
        return [self.dealt(part) for part in values.split(sizes, -1)]

    def _converse(
        self, index: int, channel: str, blocks: Sequence[torch.Tensor], round_: Round, step: int, meter: StackedMeter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Make one round of all ranks' codecs, and return by shard the differences and what was sent."""
        arrival = self.codecs[index, channel].exchange(blocks, round_, step)
        meter.bytes_sent += arrival.num_bytes / self._topology.world_size
        if self.algorithm.requires.stochastic != "doubly":  # codecs assume that rows sum to 1
            for shard, difference, sent in zip(self._shards, arrival.differences, arrival.sent, strict=True):
                for row, rank in enumerate(shard.ranks):
                    if round_.peers(rank):
                        difference[row].add_(sent[row], alpha=row_sum(round_, rank) - 1)
        return arrival.differences, arrival.sent


class RankCodecs(StackedCodec):
    """A codec for each rank, for several devices, or for compressions without a stacked codec.

    Each is on the device of its rank's values, with messages copied between them.
    ``decodes_all`` says whether what a rank without a peer would send is what the codec makes of it, or the values
    themselves.
    """

    def __init__(self, codecs: Sequence[Codec], *, decodes_all: bool = False) -> None:
        self.codecs, self._decodes_all = codecs, decodes_all

    def exchange(self, stacks: Sequence[torch.Tensor], round_: Round, step: int) -> StackedArrival:
        values = _rows(stacks)
        active = [rank for rank in range(len(values)) if round_.peers(rank)]
        conversations = {rank: self.codecs[rank].exchange(values[rank], round_, step) for rank in active}
        num_bytes = carry(conversations)
        sent = [stack.clone() for stack in stacks]
        differences = [torch.zeros_like(stack, dtype=accumulation_dtype(stack.dtype)) for stack in stacks]
        messages, rows = _rows(sent), _rows(differences)
        for rank in range(len(values)) if self._decodes_all else conversations:
            if rank not in conversations:
                self.codecs[rank].exchange(values[rank], round_, step)
            if (message := self.codecs[rank].sent) is not None:
                messages[rank].copy_(message)
        for rank, conversation in conversations.items():
            arrival = conversation.arrival
            for place, part in arrival.parts:
                rows[rank][place] = part
            if not arrival.is_finite:
                rows[rank].fill_(torch.nan)
        return StackedArrival(differences, sent, num_bytes)

    def state_dict(self, rank: int) -> dict[str, Any]:
        return self.codecs[rank].state_dict()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        for codec, state in zip(self.codecs, states, strict=True):
            codec.load_state_dict(state)


def _rows(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the rows, one per rank."""
    return [row for stack in stacks for row in stack]

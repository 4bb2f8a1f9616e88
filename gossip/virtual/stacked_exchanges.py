"""Rounds among replicas of one process: one sparse product where messages are values, else the codecs' own messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from gossip.algorithms import Algorithm, Arrived, BucketView
from gossip.communication.world import accumulation_dtype
from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.conversation import carry
from gossip.compression.part_memory import all_finite
from gossip.errors import GossipError
from gossip.parameters.buckets import Bucket
from gossip.step.exchanges import CHANNEL_STRIDE, Exchanges, InFlight, row_sum
from gossip.virtual.mixing_products import KnownRows, weighted_differences
from gossip.virtual.replica_state import joined
from gossip.virtual.shards import Shard, stacked_views
from topologies import Round, Topology
from topologies.analysis.traffic import round_traffic


@dataclass
class StackedInFlight(InFlight):
    """A round of one block whose messages have been made, but not combined.

    Attributes
    ----------
    stacks : dict of str to list of Tensor, [k, numel]
        By channel and shard: what each replica is to add, in the dtype of accumulation.
    """

    stacks: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def differences(self) -> dict[str, list[torch.Tensor]]:
        return self.stacks


class StackedMeter:
    """What a step cost all replicas.

    Parameters
    ----------
    world_size : int

    Attributes
    ----------
    num_refused : Tensor, [n], int64
        How many blocks' messages each rank refused.
    """

    def __init__(self, world_size: int) -> None:
        self.num_refused = torch.zeros(world_size, dtype=torch.int64)
        self.codec_bytes = 0.0  # the mean over ranks
        self.values_sent: list[tuple[Round, bool, int]] = []  # round, whether summed on the wire, bytes of a message

    @property
    def bytes_sent(self) -> float:
        """The mean over ranks; a uniform group's as those of a ring all-reduce."""
        total = self.codec_bytes
        for round_, is_summed, num_bytes in self.values_sent:
            num_messages = round_traffic(round_).sent if is_summed else round_.num_targets()
            total += float(np.mean(num_messages)) * num_bytes
        return total


class StackedExchanges(Exchanges[StackedInFlight, StackedMeter]):
    """Those of all replicas at once.

    Parameters
    ----------
    shards : sequence of Shard
    buckets : sequence of Bucket
        Whose layout the first blocks of a shard have; the others are float buffers, which are never compressed.
    optimizers : sequence of Optimizer
        Over the stacks.
    topology : Topology
    algorithm : Algorithm
    compression : Compression

    Attributes
    ----------
    codecs : dict of (int, str) to list of Codec
        By block and channel, and then by rank; none of messages that are values.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        buckets: Sequence[Bucket],
        optimizers: Sequence[Optimizer],
        topology: Topology,
        algorithm: Algorithm,
        compression: Compression,
    ) -> None:
        super().__init__(optimizers, topology, algorithm, compression)
        self._shards = shards
        self._optimizers = optimizers
        self._buckets: dict[int, Bucket] = {}  # by block
        self._views: list[list[BucketView]] = []
        self.codecs: dict[tuple[int, str], list[Codec]] = {}
        self._known_rows: KnownRows = {}
        self.add(buckets)
        for index in range(len(buckets), len(shards[0].blocks)):
            self._views.append([BucketView(shard.blocks[index]) for shard in shards])
            self.in_flight.append(None)

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Exchange these too, whose blocks the shards have got, from the round of this step on."""
        for bucket in buckets:
            index = len(self.in_flight)
            self.in_flight.append(None)
            self._buckets[index] = bucket
            self._views.append([self._make_view(shard, index) for shard in self._shards])
            for view in self._views[index]:
                self._begin(view)
            self._make_codecs(index)

    def _make_view(self, shard: Shard, index: int) -> BucketView:
        bucket = self._buckets[index]
        parameters = [shard.parameters[name] for name in bucket.names]
        return BucketView(shard.blocks[index], parameters, lambda flat: stacked_views(bucket, flat), self._optimizers)

    def _make_codecs(self, index: int) -> None:
        """One for each channel and rank; none where messages are values."""
        bucket, world_size = self._buckets[index], self._topology.world_size
        if world_size == 1:
            return
        for number, channel in enumerate(self._channels(index)):
            rows = self._rows([self._like(view, channel) for view in self._views[index]])
            compression = self._compression_of(index, channel)
            if compression.messages(rows[0][None]) is not None:
                continue
            layout = bucket.shape.views
            codecs = [
                compression.codec(BucketShape(bucket.index + CHANNEL_STRIDE * number, row, layout), rank)
                for rank, row in enumerate(rows)
            ]
            self.codecs[index, channel] = codecs

    @staticmethod
    def _rows(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's."""
        return [row for stack in stacks for row in stack]

    # ------------------------------------------------------------------ what the policy asks for

    def views(self, index: int) -> Sequence[BucketView]:
        return self._views[index]

    def holds_parameters(self, index: int) -> bool:
        return index in self._buckets

    def _takes_part(self, round_: Round) -> bool:
        return self._topology.world_size > 1 and not round_.is_identity

    def _start(
        self, index: int, messages: Mapping[str, list[torch.Tensor]], round_: Round, step: int, meter: StackedMeter
    ) -> StackedInFlight:
        in_flight = StackedInFlight(round_, step)
        keeps_sent = bool(self._readers)
        for channel, blocks in messages.items():
            if (index, channel) in self.codecs:
                in_flight.stacks[channel], sent = self._converse(index, channel, blocks, round_, step, meter)
            else:
                compression = self._compression_of(index, channel)
                values = [_values(compression, block) for block in blocks]
                wide = accumulation_dtype(blocks[0].dtype)
                in_flight.stacks[channel] = weighted_differences(round_, self._shards, values, wide, self._known_rows)
                sent = [message.clone() for message in values] if keeps_sent else []
                is_summed = values[0].dtype == blocks[0].dtype  # on the wire, in groups
                meter.values_sent.append((round_, is_summed, values[0][0].nbytes))
            if keeps_sent:
                in_flight.sent[channel] = sent
        return in_flight

    def _accepted(
        self, index: int, in_flight: StackedInFlight, meter: StackedMeter
    ) -> Iterator[tuple[BucketView, Mapping[str, Arrived]]]:
        self._show(index, in_flight)
        for number, (shard, view) in enumerate(zip(self._shards, self._views[index], strict=True)):
            differences = {channel: stacks[number] for channel, stacks in in_flight.stacks.items()}
            if not all(map(all_finite, differences.values())):
                is_finite = [difference.isfinite().all(1) for difference in differences.values()]
                refused = ~torch.stack(is_finite).all(0)
                self._check_own(shard, index, refused, in_flight.round_index)
                for difference in differences.values():
                    difference[refused] = 0
                meter.num_refused[shard.ranks.start : shard.ranks.stop] += refused.cpu()
            yield view, {channel: Arrived(difference) for channel, difference in differences.items()}

    def _written(self, index: int) -> None:
        if index not in self._buckets:
            return
        for shard, view in zip(self._shards, self._views[index], strict=True):
            if any((index, channel) in self.codecs for channel in self._channels(index)):
                for gap in self._buckets[index].padding:
                    view.values[:, gap] = 0
            torch.autograd.graph.increment_version([shard.parameters[name] for name in self._buckets[index].names])

    def _restored(self, round_: Round, round_index: int, saved: Mapping[str, Any]) -> StackedInFlight:
        sent = {channel: self.dealt(rows) for channel, rows in saved["sent"].items()}
        stacks = {channel: self.dealt(rows) for channel, rows in saved["differences"].items()}
        return StackedInFlight(round_, round_index, sent, stacks)

    def joined(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return joined(rows)

    def names(self, index: int) -> Sequence[str]:
        return self._buckets[index].names

    def dealt(self, values: torch.Tensor) -> list[torch.Tensor]:
        rows = values.split([len(shard.ranks) for shard in self._shards])
        return [own.to(shard.device, copy=True) for shard, own in zip(self._shards, rows, strict=True)]

    def _forget(self) -> None:
        self.codecs = {}
        for index in self._buckets:
            self._make_codecs(index)

    def _codec_states(self) -> list[list[dict[str, Any]]]:
        return [[codec.state_dict() for codec in codecs] for codecs in self.codecs.values()]

    def _load_codec_states(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        for codecs, remembered in zip(self.codecs.values(), states, strict=True):
            for codec, state in zip(codecs, remembered, strict=True):
                codec.load_state_dict(state)

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether what :meth:`state_dict` gave is of the same blocks and codecs."""
        if len(state["in_flight"]) != len(self.in_flight):
            return False
        if [len(codecs) for codecs in state["codecs"]] != [len(codecs) for codecs in self.codecs.values()]:
            return False
        return all(
            saved is None
            or {name: rows.shape[1] for name, rows in saved["differences"].items()}
            == {name: self._like(self._views[index][0], name).shape[1] for name in self._channels(index)}
            for index, saved in enumerate(state["in_flight"])
        )

    def _check_own(self, shard: Shard, index: int, refused: torch.Tensor, round_index: int) -> None:
        spoilt = refused & ~shard.blocks[index].isfinite().all(1)
        if bool(spoilt.any()):
            rank = shard.ranks.start + int(spoilt.nonzero()[0])
            raise GossipError(
                f"rank {rank}: step {round_index + 1}, bucket {index}: what this rank sent in round {round_index} is "
                "not finite: its own parameters are spoilt, and its peers have refused them; start again from a "
                "checkpoint, with a smaller learning rate"
            )

    def _converse(
        self,
        index: int,
        channel: str,
        blocks: Sequence[torch.Tensor],
        round_: Round,
        step: int,
        meter: StackedMeter,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One round of all ranks' codecs, their messages carried by hand: differences, and what was sent, by shard."""
        codecs = self.codecs[index, channel]
        active = [rank for rank in range(len(codecs)) if round_.peers(rank)]
        values = self._rows(blocks)
        conversations = {rank: codecs[rank].exchange(values[rank], round_, step) for rank in active}
        meter.codec_bytes += carry(conversations) / len(codecs)
        differences, sent = [], []
        for shard, block in zip(self._shards, blocks, strict=True):
            sent.append(block.clone())
            total = torch.zeros(block.shape, dtype=accumulation_dtype(block.dtype), device=block.device)
            for row, rank in enumerate(shard.ranks):
                if rank not in conversations:
                    continue
                if (message := codecs[rank].sent) is not None:
                    sent[-1][row] = message
                arrival = conversations[rank].arrival
                for place, part in arrival.parts:
                    total[row, place] = part
                if self.algorithm.requires.stochastic != "doubly":  # what was decoded takes the rows' sums for 1
                    total[row].add_(sent[-1][row], alpha=row_sum(round_, rank) - 1)
                if not arrival.is_finite:
                    total[row] = torch.nan
            differences.append(total)
        return differences, sent


def _values(compression: Compression, block: torch.Tensor) -> torch.Tensor:
    messages = compression.messages(block)
    assert messages is not None
    return messages

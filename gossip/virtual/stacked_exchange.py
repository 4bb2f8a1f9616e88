"""Rounds among replicas of one process: one sparse product where messages are values, else the codecs' own messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch.optim import Optimizer

from gossip.algorithms import Algorithm
from gossip.communication.world import accumulation_dtype
from gossip.compression.codec import BucketShape, Codec, Compression, Messages
from gossip.compression.part_memory import all_finite
from gossip.compression.value_codecs import Uncompressed
from gossip.errors import GossipError
from gossip.parameters.buckets import Bucket
from gossip.step.mixing import UsesExchange, no_messages_to_see
from gossip.virtual.mixing_products import KnownRows, weighted_differences
from gossip.virtual.replica_state import joined
from gossip.virtual.shards import Shard, stacked_views, written
from topologies import Round, Topology
from topologies.analysis.traffic import round_traffic


@dataclass
class InFlight:
    """A round of one block whose messages have been made, but not combined.

    Attributes
    ----------
    round_index : int
    differences : list of Tensor, [k, numel]
        By shard: what each replica is to add, in the dtype of accumulation.
    sent : list of Tensor, [k, numel], or None
        The messages, if an optimizer wants to see them.
    """

    round_index: int
    differences: list[torch.Tensor]
    sent: list[torch.Tensor] | None = None


class StackedExchange:
    """What :class:`gossip.step.mixing.Mixer` does for one rank, for all replicas at once.

    Parameters
    ----------
    shards : sequence of Shard
    buckets : sequence of Bucket
        Whose layout the first blocks of a shard have; the others are float buffers, which are never compressed.
    optimizers : sequence of Optimizer
        Those with a ``pre_average_hook`` see every exchange, see :class:`gossip.UsesExchange`: of all replicas at once.
    topology : Topology
    algorithm : Algorithm
    compression : Compression

    Attributes
    ----------
    in_flight : list of InFlight or None
        By block.
    codecs : dict of int to list of Codec
        By block, and then by rank; none of blocks whose messages are values.
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
        self._shards = shards
        self._buckets = dict(enumerate(buckets))  # by block
        self._topology = topology
        self._algorithm = algorithm
        self._compression = compression
        self._readers = [optimizer for optimizer in optimizers if isinstance(optimizer, UsesExchange)]
        self.in_flight: list[InFlight | None] = []
        self.codecs: dict[int, list[Codec]] = {}
        self._known_rows: KnownRows = {}
        self._codec_bytes = 0.0  # in the newest round, the mean over ranks
        self._values_sent: list[tuple[Round, bool, int]] = []  # round, whether summed on the wire, bytes of a message
        self.forget()

    @property
    def bytes_sent(self) -> float:
        """In the newest round, the mean over ranks; a uniform group's as those of a ring all-reduce."""
        total = self._codec_bytes
        for round_, is_summed, num_bytes in self._values_sent:
            num_messages = round_traffic(round_).sent if is_summed else round_.num_targets()
            total += float(np.mean(num_messages)) * num_bytes
        return total

    def forget(self) -> None:
        """Drop what is in flight and what codecs remember."""
        self.drop()
        self.codecs = {index: codecs for index in self._buckets if (codecs := self._make_codecs(index))}

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Exchange these too, whose blocks the shards have got, from the round of this step on."""
        for bucket in buckets:
            index = len(self.in_flight)
            self.in_flight.append(None)
            self._buckets[index] = bucket
            if codecs := self._make_codecs(index):
                self.codecs[index] = codecs

    def _make_codecs(self, index: int) -> list[Codec]:
        """One for each rank; none where messages are values."""
        ranks, bucket = range(self._topology.world_size), self._buckets[index]
        if len(ranks) == 1 or self._compression.messages(self._shards[0].blocks[index][:1]) is not None:
            return []
        codecs = [
            self._compression.codec(BucketShape(bucket.index, block, bucket.shape.views), rank)
            for block, rank in zip(self._rows(index), ranks, strict=True)
        ]
        if self._readers and any(codec.sent is None for codec in codecs):
            raise ValueError(no_messages_to_see(self._compression, self._readers[0]))
        return codecs

    def _rows(self, index: int) -> list[torch.Tensor]:
        """Each rank's values in a block."""
        return [row for shard in self._shards for row in shard.blocks[index]]

    def drop(self) -> None:
        """Drop what is in flight."""
        self.in_flight = [None] * len(self._shards[0].blocks)

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Make all messages of round ``step``; nothing happens in a round in which nobody has a peer."""
        self._codec_bytes = 0.0
        self._values_sent = []
        if self._topology.world_size == 1:
            return
        round_ = self._topology.round(step)
        if round_.is_identity:
            return
        for index in range(len(self.in_flight)):
            if index in self.codecs:
                self.in_flight[index] = self._talk(index, round_, step)
                continue
            compression = self._compression if index in self._buckets else Uncompressed()
            blocks = [shard.blocks[index] for shard in self._shards]
            messages = [_values(compression, block) for block in blocks]
            wide = accumulation_dtype(blocks[0].dtype)
            differences = weighted_differences(round_, self._shards, messages, wide, self._known_rows)
            sent = [message.clone() for message in messages] if self._readers else None
            self.in_flight[index] = InFlight(step, differences, sent)
            is_summed = messages[0].dtype == blocks[0].dtype  # on the wire, in groups
            self._values_sent.append((round_, is_summed, messages[0][0].nbytes))

    @torch.no_grad()
    def combine_(self) -> torch.Tensor:
        """Mix what is in flight into the blocks.

        Messages that are not finite are refused: nothing is mixed by those that read them.

        Returns
        -------
        Tensor, [n], int64
            How many blocks' messages each rank refused.

        Raises
        ------
        GossipError
            What a rank itself sent was not finite.
        """
        num_refused = torch.zeros(self._topology.world_size, dtype=torch.int64)
        for index, in_flight in enumerate(self.in_flight):
            if in_flight is None:
                continue
            self.in_flight[index] = None
            self._show(index, in_flight)
            for shard, difference in zip(self._shards, in_flight.differences, strict=True):
                block = shard.blocks[index]
                if not all_finite(difference):
                    refused = ~difference.isfinite().all(1)
                    self._check_own(shard, index, refused, in_flight.round_index)
                    difference[refused] = 0
                    num_refused[shard.ranks.start : shard.ranks.stop] += refused.cpu()
                self._algorithm.combine_(block, difference, in_flight.round_index)
                if index in self.codecs:
                    for gap in self._buckets[index].padding:
                        block[:, gap] = 0
        written(self._shards)
        if bool(num_refused.any()):
            ranks = ", ".join(map(str, num_refused.nonzero().flatten().tolist()))
            logger.warning("a message to each of the ranks {} is not finite and is refused", ranks)
        return num_refused

    def state_dict(self) -> dict[str, Any]:
        """What is in flight, by block, and what codecs remember; copies."""
        return {
            "in_flight": [
                None
                if each is None
                else {
                    "round": each.round_index,
                    "differences": joined(each.differences),
                    "sent": None if each.sent is None else joined(each.sent),
                }
                for each in self.in_flight
            ],
            "codecs": [[codec.state_dict() for codec in codecs] for codecs in self.codecs.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what :meth:`state_dict` gave; False if it is of other blocks, and then nothing is."""
        sizes = [shard.blocks[index].shape[1] for shard in self._shards[:1] for index in range(len(self.in_flight))]
        saved = state["in_flight"]
        own = list(self.codecs.values())
        if len(saved) != len(sizes) or [len(each) for each in state["codecs"]] != [len(each) for each in own]:
            return False
        if any(
            each is not None and each["differences"].shape[1] != size for each, size in zip(saved, sizes, strict=True)
        ):
            return False
        for index, entry in enumerate(saved):
            if entry is not None:
                sent = None if entry["sent"] is None else self._dealt(entry["sent"])
                self.in_flight[index] = InFlight(entry["round"], self._dealt(entry["differences"]), sent)
        for codecs, states in zip(own, state["codecs"], strict=True):
            for codec, remembered in zip(codecs, states, strict=True):
                codec.load_state_dict(remembered)
        return True

    def _dealt(self, values: torch.Tensor) -> list[torch.Tensor]:
        rows = values.split([len(shard.ranks) for shard in self._shards])
        return [own.to(shard.device, copy=True) for shard, own in zip(self._shards, rows, strict=True)]

    def _check_own(self, shard: Shard, index: int, refused: torch.Tensor, round_index: int) -> None:
        spoilt = refused & ~shard.blocks[index].isfinite().all(1)
        if bool(spoilt.any()):
            rank = shard.ranks.start + int(spoilt.nonzero()[0])
            raise GossipError(
                f"rank {rank}: step {round_index + 1}, bucket {index}: what this rank sent in round {round_index} is "
                "not finite: its own parameters are spoilt, and its peers have refused them; start again from a "
                "checkpoint, with a smaller learning rate"
            )

    def _show(self, index: int, in_flight: InFlight) -> None:
        """Call the optimizers' pre_average_hook for their parameters in a bucket."""
        if in_flight.sent is None or index not in self._buckets:
            return
        bucket, round_ = self._buckets[index], self._topology.round(in_flight.round_index)
        for optimizer in self._readers:
            held = {id(stack) for group in optimizer.param_groups for stack in group["params"]}
            for shard, sent, difference in zip(self._shards, in_flight.sent, in_flight.differences, strict=True):
                stacks = [shard.parameters[name] for name in bucket.names]
                places = [place for place, stack in enumerate(stacks) if id(stack) in held]
                if not places:
                    continue
                ours, mixed = stacked_views(bucket, sent), stacked_views(bucket, sent + difference)
                optimizer.pre_average_hook(
                    [stacks[place] for place in places],
                    [ours[place] for place in places],
                    [mixed[place] for place in places],
                    round_,
                    in_flight.round_index,
                )

    def _talk(self, index: int, round_: Round, step: int) -> InFlight:
        """One round of all ranks' codecs, their messages carried by hand."""
        codecs = self.codecs[index]
        active = [rank for rank in range(len(codecs)) if round_.peers(rank)]
        values = self._rows(index)
        sent = {rank: codecs[rank].encode(values[rank], round_, step) for rank in active}
        receive_buffers = {rank: codecs[rank].receive_buffers() for rank in active}
        num_bytes = _carry(sent, receive_buffers)
        conversations = {rank: codecs[rank].follow_up(sent[rank], receive_buffers[rank]) for rank in active}
        while conversations:
            turns = {
                rank: turn
                for rank, conversation in conversations.items()
                if (turn := next(conversation, None)) is not None
            }
            conversations = {rank: conversations[rank] for rank in turns}
            num_bytes += _carry(
                {rank: turn[0] for rank, turn in turns.items()}, {rank: turn[1] for rank, turn in turns.items()}
            )
        self._codec_bytes += num_bytes / len(codecs)
        differences, messages = [], []
        for shard in self._shards:
            block = shard.blocks[index]
            messages += [block.clone()] if self._readers else []
            total = torch.zeros(block.shape, dtype=accumulation_dtype(block.dtype), device=block.device)
            for row, rank in enumerate(shard.ranks):
                if rank not in receive_buffers:
                    continue
                if (message := codecs[rank].sent) is not None and self._readers:
                    messages[-1][row] = message
                is_finite = codecs[rank].is_finite(receive_buffers[rank])
                for place, part in codecs[rank].decode(receive_buffers[rank]):
                    total[row, place] = part
                if not is_finite:
                    total[row] = torch.nan
            differences.append(total)
        return InFlight(step, differences, messages if self._readers else None)


def _values(compression: Compression, block: torch.Tensor) -> torch.Tensor:
    messages = compression.messages(block)
    assert messages is not None
    return messages


def _carry(sent: Mapping[int, Messages], receive_buffers: Mapping[int, Messages]) -> int:
    """Put what was sent where it is expected; how many bytes that were."""
    num_bytes = 0
    for source, parcels in sent.items():
        for target, message in parcels.items():
            receive_buffers[target][source].copy_(message)
            num_bytes += message.nbytes
    return num_bytes

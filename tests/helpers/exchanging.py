"""Codecs of several ranks that exchange in one process, without a transport."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gossip import BucketShape, Codec, Compression
from gossip.compression.codec import Messages
from topologies import Topology

View = tuple[tuple[int, ...], tuple[int, ...], int]


def one_matrix(numel: int) -> list[View]:
    """A square matrix, the last of whose rows are a vector."""
    side = math.isqrt(numel)
    return [((side, side), (side, 1), 0), ((numel - side * side,), (1,), side * side)]


class Ranks:
    """The replicas of one bucket, [n] tensors of [numel], and their codecs.

    Parameters
    ----------
    compression : Compression
    topology : Topology
    values : sequence of Tensor
    views : sequence of (shape, stride, offset), optional
        Where the parameters lie in each.

    Attributes
    ----------
    num_bytes : int
        What all of them sent in the newest round.
    are_finite : dict
        What each rank's codec says of the newest round.
    """

    def __init__(
        self,
        compression: Compression,
        topology: Topology,
        values: Sequence[torch.Tensor],
        views: Sequence[View] | None = None,
    ) -> None:
        self.topology = topology
        self.values = [each.clone() for each in values]
        self.codecs: list[Codec] = [
            compression.codec(BucketShape(0, each, views), rank) for rank, each in enumerate(self.values)
        ]
        self.num_bytes = 0
        self.are_finite: dict[int, bool] = {}
        self._accumulation_dtype = torch.float64 if values[0].dtype == torch.float64 else torch.float32

    def exchange(self, step: int) -> list[torch.Tensor | None]:
        """One round: each rank's sum of differences; None for a rank without peers."""
        round_ = self.topology.round(step)
        self.num_bytes = 0
        active = [rank for rank in range(len(self.values)) if round_.peers(rank)]
        sent = {rank: self.codecs[rank].encode(self.values[rank], round_, step) for rank in active}
        receive_buffers = {rank: self.codecs[rank].receive_buffers() for rank in active}
        self._carry(sent, receive_buffers)
        conversations = {rank: self.codecs[rank].follow_up(sent[rank], receive_buffers[rank]) for rank in active}
        while conversations:
            turns = {rank: next(conversation, None) for rank, conversation in conversations.items()}
            assert len({turn is None for turn in turns.values()}) == 1, "some ranks expect more, others do not"
            more = {rank: turn for rank, turn in turns.items() if turn is not None}
            if not more:
                break
            self._carry({rank: turn[0] for rank, turn in more.items()}, {rank: turn[1] for rank, turn in more.items()})
        self.are_finite = {rank: self.codecs[rank].is_finite(receive_buffers[rank]) for rank in active}
        return [
            self._decoded(rank, receive_buffers[rank]) if rank in active else None for rank in range(len(self.values))
        ]

    def _decoded(self, rank: int, received: Messages) -> torch.Tensor:
        whole = torch.full_like(self.values[rank], torch.nan, dtype=self._accumulation_dtype)
        end = 0
        for place, part in self.codecs[rank].decode(received):
            assert place.start == end
            end = place.stop
            assert part.dtype == whole.dtype
            whole[place] = part
            part.fill_(torch.nan)  # it is the caller's
        assert end == whole.numel()
        return whole

    def mix(self, step: int) -> None:
        """One round, mixed in."""
        for values, difference in zip(self.values, self.exchange(step), strict=True):
            if difference is not None:
                values += difference.to(values.dtype)

    def _carry(self, sent: dict[int, Messages], receive_buffers: dict[int, Messages]) -> None:
        for rank, parcels in sent.items():
            for target, message in parcels.items():
                self.num_bytes += message.nbytes
                assert message.is_contiguous()
                assert (message.dtype, message.shape) == (
                    receive_buffers[target][rank].dtype,
                    receive_buffers[target][rank].shape,
                )
                receive_buffers[target][rank].copy_(message)
        expected = {(source, rank) for rank, parcels in receive_buffers.items() for source in parcels}
        assert expected == {(rank, target) for rank, parcels in sent.items() for target in parcels}

    @property
    def mean(self) -> torch.Tensor:
        """Of the replicas, [numel], float64."""
        return torch.stack([each.double() for each in self.values]).mean(0)

    @property
    def distance(self) -> float:
        """The largest distance of a value from the mean over replicas."""
        stacked = torch.stack([each.double() for each in self.values])
        return float((stacked - stacked.mean(0)).abs().max())

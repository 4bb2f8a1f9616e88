"""Codecs that exchange without a model: of several ranks in one process, or of one through a transport."""

import math
from collections.abc import Sequence

import torch

from gossip import BucketShape, Codec, Compression, Exchange, Transport, Uncompressed, World
from gossip.compression.codec import StackedArrival, StackedCodec
from gossip.compression.codec import View as View
from gossip.compression.conversation import Parts, carry
from gossip.virtual.stacked_exchanges import RankCodecs
from topologies import Round, Topology


def one_matrix(numel: int) -> list[View]:
    """A square matrix, the last of whose rows are a vector."""
    side = math.isqrt(numel)
    return [((side, side), (side, 1), 0), ((numel - side * side,), (1,), side * side)]


def stacked_codec(compression: Compression, bucket: BucketShape, world_size: int) -> StackedCodec:
    """As virtual workers make it: all ranks' at once, or of a codec for each."""
    stacked = compression.stacked_codec(bucket, world_size)
    return stacked or RankCodecs([compression.codec(bucket, rank) for rank in range(world_size)])


class Replicas:
    """The replicas of one bucket: ``values``, [numel] each, are the rows of ``stacked``."""

    def __init__(self, topology: Topology, values: Sequence[torch.Tensor]) -> None:
        self.topology = topology
        self.stacked = torch.stack(tuple(values))
        self.values = list(self.stacked.unbind())

    @property
    def mean(self) -> torch.Tensor:
        """Of the replicas, [numel], float64."""
        return self.stacked.double().mean(0)

    @property
    def distance(self) -> float:
        """The largest distance of a value from the mean over replicas."""
        stacked = self.stacked.double()
        return float((stacked - stacked.mean(0)).abs().max())


class StackedRanks(Replicas):
    """Replicas that are mixed all at once, as those of virtual workers; ``views`` says where the parameters lie."""

    def __init__(
        self,
        compression: Compression,
        topology: Topology,
        values: Sequence[torch.Tensor],
        views: Sequence[View] | None = None,
    ) -> None:
        super().__init__(topology, values)
        self.codec = stacked_codec(compression, BucketShape(0, values[0], views), len(values))

    def exchange(self, step: int) -> StackedArrival:
        """One round."""
        return self.codec.exchange([self.stacked], self.topology.round(step), step)

    def mix(self, step: int) -> None:
        """One round, mixed in; nothing in which nobody has a peer."""
        if not self.topology.round(step).is_identity:
            self.stacked += self.exchange(step).differences[0].to(self.stacked.dtype)


class Ranks(Replicas):
    """Replicas with a codec each, which began at ``start``; how many bytes all of them sent in the newest round."""

    def __init__(
        self,
        compression: Compression,
        topology: Topology,
        values: Sequence[torch.Tensor],
        views: Sequence[View] | None = None,
        start: torch.Tensor | None = None,
    ) -> None:
        super().__init__(topology, values)
        self.codecs: list[Codec] = [
            compression.codec(BucketShape(0, each, views, start=start), rank) for rank, each in enumerate(self.values)
        ]
        self.num_bytes = 0
        self.are_finite: dict[int, bool] = {}
        self._accumulation_dtype = torch.float64 if values[0].dtype == torch.float64 else torch.float32

    def exchange(self, step: int) -> list[torch.Tensor | None]:
        """One round: each rank's sum of differences; None for a rank without peers."""
        round_ = self.topology.round(step)
        active = [rank for rank in range(len(self.values)) if round_.peers(rank)]
        conversations = {rank: self.codecs[rank].exchange(self.values[rank], round_, step) for rank in active}
        self.num_bytes = carry(conversations)
        arrivals = {rank: conversation.arrival for rank, conversation in conversations.items()}
        self.are_finite = {rank: arrival.is_finite for rank, arrival in arrivals.items()}
        return [
            self._whole(rank, arrivals[rank].parts) if rank in arrivals else None for rank in range(len(self.values))
        ]

    def _whole(self, rank: int, parts: Parts) -> torch.Tensor:
        taken: list[torch.Tensor] = []
        end = 0
        for place, part in parts:
            assert place.start == end
            end = place.stop
            assert (part.dtype, part.shape) == (self._accumulation_dtype, (end - place.start,))
            taken.append(part.clone())
            part.fill_(torch.nan)  # it is the caller's
        assert end == len(self.values[rank])
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def mix(self, step: int) -> None:
        """One round, mixed in."""
        for values, difference in zip(self.values, self.exchange(step), strict=True):
            if difference is not None:
                values += difference.to(values.dtype)


def start(
    transport: Transport, message: torch.Tensor, round_: Round, *, world: World, step: int, bucket: int
) -> Exchange:
    """Start the exchange of ``message``; the codec is new, so that several may be under way."""
    codec = Uncompressed().codec(BucketShape(bucket, message), world.rank)
    return transport.start(codec.exchange(message, round_, step), round_, step=step, bucket=bucket)

"""The exchanges of one model: what is in flight, and how it gets into the parameters."""

from __future__ import annotations

import collections
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.algorithms import Algorithm
from gossip.communication.transports import Arrival, DistributedTransport, Exchange, Transport
from gossip.compression.codec import Codec, Compression, chunks
from gossip.compression.part_memory import all_finite
from gossip.compression.value_codecs import Uncompressed
from gossip.errors import GossipError
from gossip.measuring.profiler_ranges import profiler_range
from gossip.measuring.step_stats import Meter
from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import BufferBucket
from topologies import Round, Topology

AnyBucket = Bucket | BufferBucket


@runtime_checkable
class UsesExchange(Protocol):
    """An optimizer that wants to see what was communicated, before it is mixed in."""

    def pre_average_hook(
        self,
        parameters: Sequence[nn.Parameter],
        sent: Sequence[torch.Tensor],
        mixed: Sequence[torch.Tensor],
        round_: Round,
        round_index: int,
    ) -> None:
        """Called for every bucket, once all its messages are there and before they are combined. Local.

        Parameters
        ----------
        parameters : sequence of Parameter
            Those of this optimizer in the bucket, as they are now.
        sent, mixed : sequence of Tensor
            For each of them, in its shape: what this rank sent, and ``sum_j W[i, j]`` times what rank j sent, in the
            dtype of accumulation. To be read, not written.
        round_ : Round
            The round in which they were sent.
        round_index : int
            Its index.
        """


@dataclass
class InFlight:
    """An exchange with all that belongs to it: they travel together.

    Attributes
    ----------
    exchange : Exchange
    sent : Tensor, [numel], or None
        This rank's message, if it is one tensor.
    round : Round
    round_index : int
    launched_at : float
        ``time.perf_counter()``.
    bytes_counted : Counter
        Of ``exchange.bytes_by_peer``, what some step's costs contain already.
    """

    exchange: Exchange
    sent: torch.Tensor | None
    round: Round
    round_index: int
    launched_at: float
    bytes_counted: Counter[int] = field(default_factory=Counter)
    _difference: torch.Tensor | None = None

    def difference(self) -> torch.Tensor:
        """Wait for it, once; the weighted sum of the messages' differences to this rank's, [numel]."""
        if self._difference is None:
            self._difference = torch.cat([part.clone() for _, part in self.exchange.wait().parts])
        return self._difference

    def arrival(self) -> Arrival:
        """Wait for it; what came, bit by bit."""
        if self._difference is None:
            return self.exchange.wait()
        return whole(self._difference)

    def count_bytes(self, meter: Meter) -> None:
        """Add to a step's costs what has been sent since the last call."""
        sent = Counter(self.exchange.bytes_by_peer)
        for peer, num_bytes in (sent - self.bytes_counted).items():
            meter.bytes_by_peer[peer] += num_bytes
            meter.bytes_sent += num_bytes
        self.bytes_counted = sent


@dataclass
class Arrived:
    """An exchange whose outcome is known already, from a checkpoint."""

    difference: torch.Tensor
    bytes_by_peer: Mapping[int, int] = field(default_factory=dict)
    arrived_at: Mapping[int, float] = field(default_factory=dict)

    def wait(self) -> Arrival:
        return whole(self.difference)


def whole(difference: torch.Tensor) -> Arrival:
    """What came, known as a whole; ``difference`` stays as it is."""
    is_finite = not difference.is_cpu or all_finite(difference)
    parts = ((part, difference[part].clone()) for part in chunks(difference.numel(), difference.device))
    return Arrival(parts, is_finite)


class Mixer:
    """Sends buckets to the peers and combines what comes back.

    Parameters
    ----------
    buckets : sequence of Bucket or BufferBucket
        By index.
    optimizers : sequence of Optimizer
        Those with a ``pre_average_hook`` see every exchange, see :class:`UsesExchange`.
    topology : Topology
    transport : Transport or None
        None in a world of one.
    algorithm : Algorithm
    compression : Compression
        Of parameters. Buffers are sent as they are.
    rank : int

    Attributes
    ----------
    in_flight : list of InFlight or None
        By bucket.
    codecs : list of Codec
        By bucket; none in a world of one.

    Raises
    ------
    ValueError
        An optimizer wants to see messages that the compression does not have.
    """

    def __init__(
        self,
        buckets: Sequence[AnyBucket],
        optimizers: Sequence[Optimizer],
        topology: Topology,
        transport: Transport | None,
        algorithm: Algorithm,
        compression: Compression,
        rank: int,
    ) -> None:
        self.in_flight: list[InFlight | None] = [None] * len(buckets)
        self.algorithm = algorithm
        self._topology = topology
        self._transport = transport
        self._rank = rank
        self._buckets = list(buckets)
        self._compression = compression
        self.codecs = self._make_codecs(buckets)
        self._readers = [optimizer for optimizer in optimizers if isinstance(optimizer, UsesExchange)]
        if self._readers and any(codec.sent is None for codec in self.codecs):
            raise ValueError(no_messages_to_see(compression, self._readers[0]))

    def add(self, buckets: Sequence[AnyBucket]) -> None:
        """Exchange these too, from the round of this step on. Local, on all ranks before the same step."""
        self._buckets += buckets
        self.in_flight += [None] * len(buckets)
        self.codecs += self._make_codecs(buckets)

    def _make_codecs(self, buckets: Sequence[AnyBucket]) -> list[Codec]:
        if self._transport is None:
            return []
        plain = Uncompressed()
        compressions = [self._compression if isinstance(bucket, Bucket) else plain for bucket in buckets]
        codecs = [each.codec(bucket.shape, self._rank) for each, bucket in zip(compressions, buckets, strict=True)]
        if isinstance(self._transport, DistributedTransport):
            for bucket, codec in zip(buckets, codecs, strict=True):
                self._transport.prepare(codec, bucket.index)
        return codecs

    @property
    def has_in_flight(self) -> bool:
        """Whether any bucket waits for messages."""
        return any(each is not None for each in self.in_flight)

    def send(self, bucket: AnyBucket, step: int, meter: Meter) -> None:
        """Start round ``step`` of ``bucket``; nothing happens in a round in which this rank has no peer."""
        if self._transport is None:
            return
        round_ = self._topology.round(step)
        if not round_.peers(self._rank):
            return
        with profiler_range("gossip::send"):
            codec = self.codecs[bucket.index]
            messages = codec.encode(bucket.block, round_, step)
            launched_at = time.perf_counter()
            exchange = self._transport.start(codec, messages, round_, step=step, bucket=bucket.index)
        in_flight = self.in_flight[bucket.index] = InFlight(exchange, codec.sent, round_, step, launched_at)
        in_flight.count_bytes(meter)

    def combine_(self, bucket: AnyBucket, meter: Meter) -> None:
        """Wait for what is in flight for ``bucket``, if anything is, and mix it into its values.

        Messages that are not finite are refused: nothing is mixed, as if the peers had not been there.

        Raises
        ------
        ExchangeError
            The messages did not arrive.
        GossipError
            What this rank itself sent was not finite.
        """
        in_flight, self.in_flight[bucket.index] = self.in_flight[bucket.index], None
        if in_flight is None:
            return
        arrival = self._await(in_flight, meter)
        with profiler_range("gossip::mix"):
            for optimizer in self._readers:
                _show(optimizer, bucket, in_flight)
            if not arrival.is_finite:
                collections.deque(arrival.parts, maxlen=0)  # the codec must not miss it
                self._refuse(in_flight, bucket, meter)
                return
            squares: float | torch.Tensor = 0.0
            for part, difference in arrival.parts:
                square = _squared_norm(difference)
                if not isinstance(square, torch.Tensor) and not math.isfinite(square):
                    self._refuse(in_flight, bucket, meter)  # this rank's own message: all others are finite
                squares = squares + square
                self.algorithm.combine_(bucket.block[part], difference, in_flight.round_index)
            bucket.written()
            meter.squared_distances.append(squares * self._squared_distance_scale(in_flight.round))

    def drop(self) -> None:
        """Wait for what is in flight and forget it."""
        for index, in_flight in enumerate(self.in_flight):
            if in_flight is not None:
                in_flight.difference()
            self.in_flight[index] = None

    def state_dict(self) -> dict[str, Any]:
        """What is in flight, awaited but not applied, and the codecs' states; copies. By bucket.

        Training goes on as if nobody had looked.
        """
        in_flight = [
            None
            if each is None
            else {
                "round": each.round_index,
                "difference": each.difference().clone(),
                "sent": None if each.sent is None else each.sent.clone(),
            }
            for each in self.in_flight
        ]
        return {"in_flight": in_flight, "codecs": [codec.state_dict() for codec in self.codecs]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Drop what is in flight and take over what was, as exchanges that have arrived; None: begin anew."""
        self.drop()
        if state is None:
            self.codecs = self._make_codecs(self._buckets)
            return
        for index, entry in enumerate(state["in_flight"]):
            if entry is not None:
                self.in_flight[index] = InFlight(
                    Arrived(entry["difference"]),
                    entry["sent"],
                    self._topology.round(entry["round"]),
                    entry["round"],
                    time.perf_counter(),
                )
        for codec, saved in zip(self.codecs, state["codecs"], strict=True):
            codec.load_state_dict(saved)

    def _await(self, in_flight: InFlight, meter: Meter) -> Arrival:
        start = time.perf_counter()
        with profiler_range("gossip::wait"):
            if self._readers:
                in_flight.difference()
            arrival = in_flight.arrival()
        waited_s = time.perf_counter() - start
        meter.exposed_wait_s += waited_s
        arrivals = in_flight.exchange.arrived_at
        for peer, arrived_at in arrivals.items():
            meter.wait_by_peer_s[peer] += max(0.0, arrived_at - start)
        if arrivals:
            meter.overlapped_s += max(0.0, min(start, max(arrivals.values())) - in_flight.launched_at)
        in_flight.count_bytes(meter)
        return arrival

    def _refuse(self, in_flight: InFlight, bucket: AnyBucket, meter: Meter) -> None:
        """Count messages that are not finite; raise if this rank's is the one."""
        where = f"rank {self._rank}: step {in_flight.round_index + 1}, bucket {bucket.index}"
        ours = bucket.block if in_flight.sent is None else in_flight.sent
        if not bool(ours.isfinite().all()):
            raise GossipError(
                f"{where}: what this rank sent in round {in_flight.round_index} is not finite: its own parameters "
                "are spoilt, and its peers have refused them; start again from a checkpoint, with a smaller "
                "learning rate"
            )
        sources = ", ".join(str(rank) for rank in in_flight.round.neighbours(self._rank))
        logger.warning("{}: a message of one of the ranks {} is not finite and is refused", where, sources)
        meter.num_refused += 1

    def _squared_distance_scale(self, round_: Round) -> float:
        r"""Makes an estimate of the squared consensus distance of :math:`\|\sum_j W_{ij} m_j - m_i\|^2`.

        If the replicas' deviations from their mean are alike and independent, with variance :math:`s^2`, then the
        expectation of that square is :math:`s^2 (\sum_{j \ne i} W_{ij}^2 + (1 - W_{ii})^2)`, and the squared distance
        is :math:`s^2 (n - 1) / n`. For W = J / n the estimate is exact.
        """
        weights = round_.neighbours(self._rank).values()
        size = self._topology.world_size
        spread = sum(weight * weight for weight in weights) + (1 - round_.self_weight(self._rank)) ** 2
        return (size - 1) / size / spread if spread else 0.0


def no_messages_to_see(compression: Compression, reader: object) -> str:
    """Why an optimizer with a ``pre_average_hook`` is refused."""
    return (
        f"compression {compression.describe()} cannot serve {type(reader).__name__}: its pre_average_hook wants what "
        "every rank sent, and these messages say only what has changed along an edge; choose none, bf16, fp16, int8 or "
        "int4, or an optimizer without the hook"
    )


def _show(optimizer: Any, bucket: AnyBucket, in_flight: InFlight) -> None:
    """Call the optimizer's pre_average_hook for its parameters in the bucket."""
    if not isinstance(bucket, Bucket) or in_flight.sent is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    places = [place for place, parameter in enumerate(bucket.parameters) if id(parameter) in held]
    if places:
        sent, arrived = bucket.views(in_flight.sent), bucket.views(in_flight.difference() + in_flight.sent)
        optimizer.pre_average_hook(
            [bucket.parameters[place] for place in places],
            [sent[place] for place in places],
            [arrived[place] for place in places],
            in_flight.round,
            in_flight.round_index,
        )


def _squared_norm(difference: torch.Tensor) -> float | torch.Tensor:
    """Read at once only from the CPU: elsewhere that would hold the host until the device is done."""
    norm = torch.linalg.vector_norm(difference)
    return float(norm) ** 2 if norm.is_cpu else norm.square()

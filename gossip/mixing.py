"""The exchanges of one model: what is in flight, and how it gets into the parameters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from loguru import logger
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from gossip.algorithms import Algorithm
from gossip.buckets import Bucket
from gossip.buffers import BufferBucket
from gossip.communication.transports import Exchange, Transport
from gossip.errors import GossipError
from gossip.stats import Meter
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
    message : Tensor, [numel]
        As it was sent.
    round : Round
    round_index : int
    launched_at : float
        ``time.perf_counter()``.
    """

    exchange: Exchange
    message: torch.Tensor
    round: Round
    round_index: int
    launched_at: float
    _mixed: torch.Tensor | None = None

    def mixed(self) -> torch.Tensor:
        """Wait for it, once; the weighted sum of the messages."""
        if self._mixed is None:
            self._mixed = self.exchange.wait()
        return self._mixed


@dataclass
class Arrived:
    """An exchange whose outcome is known already, from a checkpoint."""

    mixed: torch.Tensor
    bytes_by_peer: Mapping[int, int] = field(default_factory=dict)
    arrived_at: Mapping[int, float] = field(default_factory=dict)

    def wait(self) -> torch.Tensor:
        return self.mixed


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
    rank : int

    Attributes
    ----------
    in_flight : list of InFlight or None
        By bucket.
    """

    def __init__(
        self,
        buckets: Sequence[AnyBucket],
        optimizers: Sequence[Optimizer],
        topology: Topology,
        transport: Transport | None,
        algorithm: Algorithm,
        rank: int,
    ) -> None:
        self.in_flight: list[InFlight | None] = [None] * len(buckets)
        self.algorithm = algorithm
        self._topology = topology
        self._transport = transport
        self._rank = rank
        self._messages: dict[int, torch.Tensor] = {}
        self._readers = [optimizer for optimizer in optimizers if isinstance(optimizer, UsesExchange)]

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
        with record_function("gossip::send"):
            message = self._messages.get(bucket.index)
            if message is None:
                message = self._messages[bucket.index] = torch.empty_like(bucket.block)
            message.copy_(bucket.block)
            launched_at = time.perf_counter()
            exchange = self._transport.start(message, round_, step=step, bucket=bucket.index)
        self.in_flight[bucket.index] = InFlight(exchange, message, round_, step, launched_at)
        for peer, num_bytes in exchange.bytes_by_peer.items():
            meter.bytes_by_peer[peer] += num_bytes
            meter.bytes_sent += num_bytes

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
        mixed = self._await(in_flight, meter)
        with record_function("gossip::mix"):
            for optimizer in self._readers:
                _show(optimizer, bucket, in_flight, mixed)
            difference = mixed.sub_(in_flight.message)
            if self._is_finite(difference, in_flight, bucket, meter):
                self.algorithm.combine_(bucket.block, difference, in_flight.round_index)
                bucket.written()

    def drop(self) -> None:
        """Wait for what is in flight and forget it."""
        for index, in_flight in enumerate(self.in_flight):
            if in_flight is not None:
                in_flight.mixed()
            self.in_flight[index] = None

    def state_dict(self) -> list[dict[str, Any] | None]:
        """What is in flight, by bucket: awaited, not applied; copies. Training goes on as if nobody had looked."""
        return [
            None
            if each is None
            else {"round": each.round_index, "message": each.message.clone(), "mixed": each.mixed().clone()}
            for each in self.in_flight
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any] | None] | None) -> None:
        """Drop what is in flight and take over what was, as exchanges that have arrived; None: nothing."""
        self.drop()
        for index, entry in enumerate(state or ()):
            if entry is not None:
                self.in_flight[index] = InFlight(
                    Arrived(entry["mixed"]),
                    entry["message"],
                    self._topology.round(entry["round"]),
                    entry["round"],
                    time.perf_counter(),
                )

    def _await(self, in_flight: InFlight, meter: Meter) -> torch.Tensor:
        start = time.perf_counter()
        with record_function("gossip::wait"):
            mixed = in_flight.mixed()
        waited_s = time.perf_counter() - start
        meter.exposed_wait_s += waited_s
        arrivals = in_flight.exchange.arrived_at
        for peer, arrived_at in arrivals.items():
            meter.wait_by_peer_s[peer] += max(0.0, arrived_at - start)
        if arrivals:
            meter.overlapped_s += max(0.0, min(start, max(arrivals.values())) - in_flight.launched_at)
        return mixed

    def _is_finite(self, difference: torch.Tensor, in_flight: InFlight, bucket: AnyBucket, meter: Meter) -> bool:
        norm = torch.linalg.vector_norm(difference, dtype=torch.float64 if difference.dtype == torch.float64 else None)
        scale = self._squared_distance_scale(in_flight.round)
        if not difference.is_cpu:  # reading it would hold the host until the device is done
            meter.squared_distances.append(norm.square() * scale)
            return True
        length = float(norm)
        if not _finite(length) and not bool(difference.isfinite().all()):
            where = f"rank {self._rank}: step {in_flight.round_index + 1}, bucket {bucket.index}"
            if not bool(in_flight.message.isfinite().all()):
                raise GossipError(
                    f"{where}: what this rank sent in round {in_flight.round_index} is not finite: its own parameters "
                    "are spoilt, and its peers have refused them; start again from a checkpoint, with a smaller "
                    "learning rate"
                )
            sources = ", ".join(str(rank) for rank in in_flight.round.neighbours(self._rank))
            logger.warning("{}: a message of one of the ranks {} is not finite and is refused", where, sources)
            meter.num_refused += 1
            return False
        meter.squared_distances.append(length * length * scale)
        return True

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


def _show(optimizer: Any, bucket: AnyBucket, in_flight: InFlight, mixed: torch.Tensor) -> None:
    """Call the optimizer's pre_average_hook for its parameters in the bucket."""
    if not isinstance(bucket, Bucket):
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    places = [place for place, parameter in enumerate(bucket.parameters) if id(parameter) in held]
    if places:
        sent, arrived = bucket.views(in_flight.message), bucket.views(mixed)
        optimizer.pre_average_hook(
            [bucket.parameters[place] for place in places],
            [sent[place] for place in places],
            [arrived[place] for place in places],
            in_flight.round,
            in_flight.round_index,
        )


def _finite(value: float) -> bool:
    return value - value == 0.0

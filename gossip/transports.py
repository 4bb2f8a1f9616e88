"""How a flat tensor gets mixed with the peers' in one round of a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from gossip.courier import Ticket, Works
from gossip.errors import ExchangeError
from gossip.world import World, accumulation_dtype, named
from topologies import Phase, Round, Topology

_MAX_GROUPS_PER_RANK = 16
_TAG_STEPS = 2**10  # far more steps than two ranks can be apart


class Exchange(Protocol):
    """One message on its way through one round."""

    bytes_by_peer: Mapping[int, int]
    """What this rank sends for it, by rank."""

    @property
    def arrived_at(self) -> Mapping[int, float]:
        """When the peers' messages were there (``time.perf_counter()``), by rank; complete after :meth:`wait`."""

    def wait(self) -> torch.Tensor:
        """Return ``sum_j W[i, j] m_j`` (j = i included), flat, in the dtype of accumulation.

        The tensor is the caller's until the bucket's next ``start``.

        Raises
        ------
        ExchangeError
            It failed or timed out; the text names rank, step, bucket and peers.
        """


class Transport(Protocol):
    """Carries messages; one per wrapped model."""

    def start(self, message: torch.Tensor, round_: Round, *, step: int, bucket: int) -> Exchange:
        """Start to mix ``message`` with the peers' of ``round_``, without waiting for anybody.

        Parameters
        ----------
        message : Tensor, [numel]
            Must stay as it is until the exchange has been waited for.
        round_ : Round
            One in which this rank has a peer.
        step, bucket : int
            The same on all ranks for the same exchange. A bucket's exchanges are started one at a time.
        """


class DistributedTransport:
    """Exchange over ``torch.distributed``.

    Ranks that average uniformly in disjoint groups run one small all-reduce in each, over communicators that are made
    here, once, for all rounds of the period and of a warm-up. All else goes point-to-point: unequal or directed
    weights, phases of the schedule without a period, and phases that would bring some rank to more than 16
    communicators.

    Parameters
    ----------
    world : World
    topology : Topology

    Notes
    -----
    Collective: every rank must construct it, with the same topology.
    """

    def __init__(self, world: World, topology: Topology) -> None:
        assert world.courier is not None
        self._world = world
        self._courier = world.courier
        self._arrivals: dict[int, torch.Tensor] = {}
        self._groups = {ranks: world.new_group(ranks) for ranks in _shared_groups(topology)}

    @property
    def num_communicators(self) -> int:
        """How many communicators this rank is a member of, the one over all ranks included."""
        return 1 + sum(self._world.rank in ranks for ranks in self._groups)

    def start(self, message: torch.Tensor, round_: Round, *, step: int, bucket: int) -> DistributedExchange:
        rank = self._world.rank
        # The members of a group decide alike, and the groups of a round are disjoint.
        ranks = next((ranks for ranks in round_.uniform_groups or () if rank in ranks), None)
        if ranks in self._groups:
            return self._start_all_reduce(message, ranks, step, bucket)
        return self._start_point_to_point(message, round_, step, bucket)

    def _start_all_reduce(
        self, message: torch.Tensor, ranks: tuple[int, ...], step: int, bucket: int
    ) -> DistributedExchange:
        rank = self._world.rank
        mixed = self._arrival(message, bucket, accumulation_dtype(message.dtype), 1)[0]
        mixed.copy_(message).mul_(1 / len(ranks))  # in the wide dtype: torch.mul(out=) would round in the narrow one
        group = self._groups[ranks]
        others = ", ".join(str(each) for each in ranks if each != rank)
        name = f"the all-reduce with rank{'s' * (len(ranks) > 2)} {others}"
        return DistributedExchange(
            ticket=self._courier.submit(lambda: named(name, dist.all_reduce(mixed, group=group, async_op=True))),
            message=message,
            received=mixed[None],
            weights=(1.0,),
            self_weight=0.0,
            rank=rank,
            step=step,
            bucket=bucket,
            timeout=self._world.timeout,
            sources=tuple(each for each in ranks if each != rank),
            bytes_by_peer={each: 2 * mixed.nbytes // len(ranks) for each in ranks if each != rank},
        )

    def _start_point_to_point(
        self, message: torch.Tensor, round_: Round, step: int, bucket: int
    ) -> DistributedExchange:
        rank, group = self._world.rank, self._world.group
        assert group is not None
        sources = round_.neighbours(rank)
        targets = round_.targets(rank)
        received = self._arrival(message, bucket, message.dtype, len(sources))
        tag = bucket * _TAG_STEPS + step % _TAG_STEPS  # two buckets between two ranks must never be swapped

        def post() -> Works:
            # Receives first, on every rank: gloo then moves large messages both ways at once. The other way round two
            # ranks take turns, at half the speed of the link.
            works = [
                (f"the message of rank {source}", group.recv([row], source, tag))
                for source, row in zip(sources, received, strict=True)
            ]
            return works + [(f"rank {target} to take ours", group.send([message], target, tag)) for target in targets]

        return DistributedExchange(
            ticket=self._courier.submit(post),
            message=message,
            received=received,
            weights=tuple(sources.values()),
            self_weight=round_.self_weight(rank),
            rank=rank,
            step=step,
            bucket=bucket,
            timeout=self._world.timeout,
            sources=tuple(sources),
            bytes_by_peer=dict.fromkeys(targets, message.nbytes),
        )

    def _arrival(self, message: torch.Tensor, bucket: int, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        """The bucket's buffer for what arrives, [num_rows, numel]; kept, and only ever made larger."""
        buffer = self._arrivals.get(bucket)
        if buffer is None or buffer.dtype != dtype or len(buffer) < num_rows:
            buffer = self._arrivals[bucket] = message.new_empty((num_rows, message.numel()), dtype=dtype)
        return buffer[:num_rows]


@dataclass
class DistributedExchange:
    """A message under way over ``torch.distributed``; see :class:`Exchange`."""

    ticket: Ticket
    message: torch.Tensor
    received: torch.Tensor
    weights: tuple[float, ...]
    self_weight: float
    rank: int
    step: int
    bucket: int
    timeout: timedelta
    sources: tuple[int, ...]
    bytes_by_peer: Mapping[int, int]

    @property
    def arrived_at(self) -> Mapping[int, float]:
        times = self.ticket.finished_at
        if not self.weights or len(times) < len(self.received):
            return {}
        return {source: times[min(place, len(self.received) - 1)] for place, source in enumerate(self.sources)}

    def wait(self) -> torch.Tensor:
        self._await()
        if not self.weights:
            return self.message.to(accumulation_dtype(self.message.dtype), copy=True).mul_(self.self_weight)
        mixed = self.received[0].to(accumulation_dtype(self.message.dtype))
        if self.weights[0] != 1.0:
            mixed.mul_(self.weights[0])
        for weight, row in zip(self.weights[1:], self.received[1:], strict=True):
            mixed.add_(row, alpha=weight)
        if self.self_weight != 0.0:
            mixed.add_(self.message, alpha=self.self_weight)
        return mixed

    def _await(self) -> None:
        where = f"rank {self.rank}: step {self.step}, bucket {self.bucket}"
        if not self.ticket.wait(self.timeout):
            raise ExchangeError(
                f"{where}: waited {self.timeout.total_seconds():g} s in vain for {self.ticket.awaited}; that rank is "
                "stuck, gone, or has made fewer steps (GossipDataParallel's timeout sets how long to wait)"
            )
        if self.ticket.error is not None:
            raise ExchangeError(
                f"{where}: failed while waiting for {self.ticket.awaited}: {self.ticket.error}"
            ) from self.ticket.error


def _shared_groups(topology: Topology) -> list[tuple[int, ...]]:
    """The groups of two and more ranks that get a communicator, in order of their first round."""
    groups: dict[tuple[int, ...], None] = {}
    for phase in topology.phases:
        groups |= _groups_of(phase, groups)
    return list(groups)


def _groups_of(phase: Phase, known: Mapping[tuple[int, ...], None]) -> dict[tuple[int, ...], None]:
    """The groups of a phase besides the known ones; none if some rank would be in too many with them."""
    memberships = Counter(rank for ranks in known for rank in ranks)
    groups: dict[tuple[int, ...], None] = {}
    for exchange in range(phase.num_distinct(sampled=0)):
        for ranks in phase.topology.round(exchange).uniform_groups or ():
            if len(ranks) > 1 and ranks not in known and ranks not in groups:
                groups[ranks] = None
                memberships.update(ranks)
        if max(memberships.values(), default=0) > _MAX_GROUPS_PER_RANK:
            return {}
    return groups

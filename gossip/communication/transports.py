"""How a flat tensor gets mixed with the peers' in one round of a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gossip.communication.courier import Works
from gossip.communication.lanes import Message, Pending, Tensors, post_point_to_point
from gossip.communication.world import World, accumulation_dtype
from gossip.errors import ExchangeError
from topologies import Phase, Round, Topology

_MAX_GROUPS_PER_RANK = 16
_MAX_DEVICE_GROUPS_PER_RANK = 4  # NCCL spends hundreds of MB of the device's memory on each
_NUM_SAMPLED_ROUNDS = 8  # of a schedule that has no end
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
    communicators (4 with backends other than gloo, none but the group itself if such a group was given).

    Parameters
    ----------
    world : World
    topology : Topology

    Notes
    -----
    Collective: every rank must construct it, with the same topology.
    """

    def __init__(self, world: World, topology: Topology) -> None:
        assert world.membership is not None
        self._world = world
        self._topology = topology
        self._arrivals: dict[int, torch.Tensor] = {}
        self._shared = dict.fromkeys(
            _shared_groups(topology, _MAX_GROUPS_PER_RANK if world.membership.is_gloo else _MAX_DEVICE_GROUPS_PER_RANK)
        )
        if not world.can_split:  # the group that was given is the only one there is
            self._shared = {ranks: None for ranks in self._shared if len(ranks) == world.world_size}
        for ranks in self._shared:
            if world.rank in ranks or not world.membership.is_gloo:
                world.communicator(ranks, "mixing")

    @property
    def num_communicators(self) -> int:
        """How many communicators this rank is a member of, the one over all ranks included."""
        return len(
            {id(self._world.group)}
            | {id(self._world.communicator(ranks, "mixing")) for ranks in self._shared if self._world.rank in ranks}
        )

    def describe(self) -> str:
        """One line for the log: the backend, the communicators, and which rounds go which way. Local."""
        assert self._world.membership is not None
        ways: dict[str, list[int]] = {}
        for phase in self._topology.phases:
            for exchange in range(phase.num_distinct(sampled=_NUM_SAMPLED_ROUNDS)):
                ways.setdefault(self._way(phase.topology.round(exchange)), []).append(exchange)
        listed = ", ".join(ways)
        number = self.num_communicators
        return (
            f"backend {self._world.membership.backend_name}, {number} communicator{'s' * (number > 1)} on rank "
            f"{self._world.rank}; rounds {listed}"
        )

    def _way(self, round_: Round) -> str:
        groups = [ranks for ranks in round_.uniform_groups or () if len(ranks) > 1]
        if round_.uniform_groups is not None and not groups:
            return "silent"
        by_group = [ranks in self._shared for ranks in groups]
        if groups and all(by_group):
            return "by all-reduce in groups"
        return "partly by all-reduce in groups" if any(by_group) else "point-to-point"

    def start(self, message: torch.Tensor, round_: Round, *, step: int, bucket: int) -> DistributedExchange:
        check_device(self._world, message, step, bucket)
        rank = self._world.rank
        # The members of a group decide alike, and the groups of a round are disjoint.
        ranks = next((ranks for ranks in round_.uniform_groups or () if rank in ranks), None)
        if ranks in self._shared:
            return self._start_all_reduce(message, ranks, step, bucket)
        return self._start_point_to_point(message, round_, step, bucket)

    def _start_all_reduce(
        self, message: torch.Tensor, ranks: tuple[int, ...], step: int, bucket: int
    ) -> DistributedExchange:
        assert self._world.lanes is not None
        rank = self._world.rank
        mixed = self._arrival(message, bucket, accumulation_dtype(message.dtype), 1)[0]
        mixed.copy_(message).mul_(1 / len(ranks))  # in the wide dtype: torch.mul(out=) would round in the narrow one
        group = self._world.communicator(ranks, "mixing")
        others = ", ".join(str(each) for each in ranks if each != rank)
        name = f"the all-reduce with rank{'s' * (len(ranks) > 2)} {others}"

        def post(_: Tensors, received: Tensors) -> Works:
            return ((name, group.allreduce([received[0]])),)

        return DistributedExchange(
            pending=self._world.lanes.submit(post, [mixed], [mixed]),
            message=message,
            received=mixed[None],
            weights=(1.0,),
            self_weight=0.0,
            world=self._world,
            step=step,
            bucket=bucket,
            sources=tuple(each for each in ranks if each != rank),
            bytes_by_peer={each: 2 * mixed.nbytes // len(ranks) for each in ranks if each != rank},
        )

    def _start_point_to_point(
        self, message: torch.Tensor, round_: Round, step: int, bucket: int
    ) -> DistributedExchange:
        assert self._world.lanes is not None
        rank, group = self._world.rank, self._world.group
        sources = round_.neighbours(rank)
        targets = round_.targets(rank)
        rows = self._arrival(message, bucket, message.dtype, len(sources))
        tag = bucket * _TAG_STEPS + step % _TAG_STEPS  # two buckets between two ranks must never be swapped

        def post(sent: Tensors, received: Tensors) -> Works:
            return post_point_to_point(
                group,
                [Message(source, row, tag) for source, row in zip(sources, received, strict=True)],
                [Message(target, sent[0], tag) for target in targets],
            )

        return DistributedExchange(
            pending=self._world.lanes.submit(post, [message], list(rows)),
            message=message,
            received=rows,
            weights=tuple(sources.values()),
            self_weight=round_.self_weight(rank),
            world=self._world,
            step=step,
            bucket=bucket,
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

    pending: Pending
    message: torch.Tensor
    received: torch.Tensor
    weights: tuple[float, ...]
    self_weight: float
    world: World
    step: int
    bucket: int
    sources: tuple[int, ...]
    bytes_by_peer: Mapping[int, int]

    @property
    def arrived_at(self) -> Mapping[int, float]:
        times = self.pending.finished_at
        if not self.weights or len(times) < len(self.received):
            return {}
        return {source: times[min(place, len(self.received) - 1)] for place, source in enumerate(self.sources)}

    def wait(self) -> torch.Tensor:
        where = f"rank {self.world.rank}: step {self.step}, bucket {self.bucket}"
        timeout = self.world.timeout
        if not self.pending.wait(timeout):
            ahead = self.world.roll_call.explain_ahead()
            raise ExchangeError(
                f"{where}: waited {timeout.total_seconds():g} s in vain for {self.pending.awaited}; that rank is "
                f"stuck, gone, or has made fewer steps{f' ({ahead})' * bool(ahead)} (GossipDataParallel's timeout sets "
                "how long to wait)"
            )
        if self.pending.error is not None:
            raise ExchangeError(
                f"{where}: failed while waiting for {self.pending.awaited}: {self.pending.error}"
            ) from self.pending.error
        return weighted_sum(self.message, self.received, self.weights, self.self_weight)


def _shared_groups(topology: Topology, most_per_rank: int = _MAX_GROUPS_PER_RANK) -> list[tuple[int, ...]]:
    """The groups of two and more ranks that get a communicator, in order of their first round."""
    groups: dict[tuple[int, ...], None] = {}
    for phase in topology.phases:
        groups |= _groups_of(phase, groups, most_per_rank)
    return list(groups)


def _groups_of(phase: Phase, known: Mapping[tuple[int, ...], None], most_per_rank: int) -> dict[tuple[int, ...], None]:
    """The groups of a phase besides the known ones; none if some rank would be in too many with them."""
    memberships = Counter(rank for ranks in known for rank in ranks)
    groups: dict[tuple[int, ...], None] = {}
    for exchange in range(phase.num_distinct(sampled=0)):
        for ranks in phase.topology.round(exchange).uniform_groups or ():
            if len(ranks) > 1 and ranks not in known and ranks not in groups:
                groups[ranks] = None
                memberships.update(ranks)
        if max(memberships.values(), default=0) > most_per_rank:
            return {}
    return groups


def weighted_sum(
    message: torch.Tensor, received: torch.Tensor, weights: Sequence[float], self_weight: float
) -> torch.Tensor:
    """The messages times their weights, in the dtype of accumulation; ``received`` may be used up."""
    dtype = accumulation_dtype(message.dtype)
    if not weights:
        return message.to(dtype, copy=True).mul_(self_weight)
    mixed = received[0].to(dtype)
    if weights[0] != 1.0:
        mixed.mul_(weights[0])
    for weight, row in zip(weights[1:], received[1:], strict=True):
        mixed.add_(row, alpha=weight)
    if self_weight != 0.0:
        mixed.add_(message, alpha=self_weight)
    return mixed


def check_device(world: World, message: torch.Tensor, step: int, bucket: int) -> None:
    """Refuse a message that the backend cannot carry.

    Raises
    ------
    ExchangeError
        Names the devices that it serves.
    """
    assert world.lanes is not None
    assert world.membership is not None
    if not world.lanes.serves(message.device):
        raise ExchangeError(
            f"rank {world.rank}: step {step}, bucket {bucket}: its parameters are on {message.device}, but the process "
            f"group has a backend for {', '.join(world.membership.backends)} only; move the module there before "
            'wrapping it, or initialise with backend="cpu:gloo,cuda:nccl"'
        )

"""How a flat tensor gets mixed with the peers' in one round of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gossip.courier import Works
from gossip.errors import ExchangeError
from gossip.lanes import Message, Pending, Tensors, post_point_to_point
from gossip.world import World, accumulation_dtype
from topologies import Round, Topology

_MAX_GROUPS_PER_RANK = 16
_MAX_DEVICE_GROUPS_PER_RANK = 4  # NCCL spends hundreds of MB of the device's memory on each
_MAX_RUNS_NAMED = 6
_TAG_STEPS = 2**10  # far more steps than two ranks can be apart


class Exchange(Protocol):
    """One message on its way through one round."""

    bytes_sent: int
    """What this rank sends for it."""

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
    here, once, for all rounds of the period. Every other round (unequal or directed weights), every schedule
    without a period, and every schedule that would need more than 16 communicators on some rank (4 with backends other
    than gloo, none but the group itself if such a group was given) goes point-to-point.

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
        for step in range(self._topology.period or 0):
            ways.setdefault(self._way(self._topology.round(step)), []).append(step)
        if self._topology.period is None:
            rounds = "every round point-to-point (the schedule has no period)"
        elif len(ways) == 1:
            rounds = f"every round {next(iter(ways))}"
        else:
            listed = "; ".join(f"{way}: {_ranges(steps)}" for way, steps in ways.items())
            rounds = f"rounds of {self._topology.period} {listed}"
        number = self.num_communicators
        return (
            f"backend {self._world.membership.backend_name}, {number} communicator{'s' * (number > 1)} on rank "
            f"{self._world.rank}; {rounds}"
        )

    def _way(self, round_: Round) -> str:
        if not any(round_.peers(rank) for rank in range(self._world.world_size)):
            return "silent"
        return "by all-reduce in groups" if self._goes_by_all_reduce(round_) else "point-to-point"

    def _goes_by_all_reduce(self, round_: Round) -> bool:
        """The same on all ranks, also on those whose own group would do."""
        if not self._shared or round_.uniform_groups is None:
            return False
        return all(len(ranks) == 1 or ranks in self._shared for ranks in round_.uniform_groups)

    def start(self, message: torch.Tensor, round_: Round, *, step: int, bucket: int) -> DistributedExchange:
        check_device(self._world, message, step, bucket)
        if self._goes_by_all_reduce(round_):
            assert round_.uniform_groups is not None
            ranks = next(ranks for ranks in round_.uniform_groups if self._world.rank in ranks)
            return self._start_all_reduce(message, ranks, step, bucket)
        return self._start_point_to_point(message, round_, step, bucket)

    def _start_all_reduce(
        self, message: torch.Tensor, ranks: tuple[int, ...], step: int, bucket: int
    ) -> DistributedExchange:
        assert self._world.lanes is not None
        mixed = self._arrival(message, bucket, accumulation_dtype(message.dtype), 1)[0]
        mixed.copy_(message).mul_(1 / len(ranks))  # in the wide dtype: torch.mul(out=) would round in the narrow one
        group = self._world.communicator(ranks, "mixing")
        others = ", ".join(str(rank) for rank in ranks if rank != self._world.rank)
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
            bytes_sent=2 * (len(ranks) - 1) * mixed.nbytes // len(ranks),
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
            bytes_sent=message.nbytes * len(targets),
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
    bytes_sent: int

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


def _shared_groups(topology: Topology, most_per_rank: int = _MAX_GROUPS_PER_RANK) -> list[tuple[int, ...]]:
    """The groups of two and more ranks in order of their first round; none if some rank would be in too many."""
    if topology.period is None:
        return []
    groups: dict[tuple[int, ...], None] = {}
    memberships = [0] * topology.world_size
    for step in range(topology.period):
        for ranks in topology.round(step).uniform_groups or ():
            if len(ranks) == 1 or ranks in groups:
                continue
            groups[ranks] = None
            for rank in ranks:
                memberships[rank] += 1
        if max(memberships) > most_per_rank:
            return []
    return list(groups)


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-2, 5" for 0, 1, 2, 5; the beginning only where there are many."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS_NAMED])
    return text if len(runs) <= _MAX_RUNS_NAMED else f"{text}, ..."

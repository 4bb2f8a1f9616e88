"""The ranks that hold a replica together, if groups of such ranks continue without each other."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from gossip.communication.waiting import Awaited, Failure, wait_for
from gossip.communication.world import World
from gossip.elastic.membership_consensus import Consensus

MOST_TIMEOUTS = 5
"""For so many time-outs a rank is waited for that itself waits for others."""


class AllGroups(Protocol):
    """What a shard group needs of the world of all groups, :class:`gossip.elastic.elastic_world.ElasticWorld`."""

    consensus: Consensus

    @property
    def is_alone(self) -> bool:
        """Whether this rank has not met the others yet."""

    @property
    def is_joint(self) -> bool:
        """Whether a collective operation of all groups is in progress."""

    def exchange_in_group(self, payload: torch.Tensor | None, what: str) -> list[torch.Tensor | None]:
        """Return what each rank of the shard group sends, by its place there; None for this rank."""


class ShardGroupWorld(World):
    """The ranks of a shard group: they train as long as all of them do.

    Within a step their collectives are plain ones. A rank may be late because it waits for another group, which is
    dropped if it is the cause, so they last up to five time-outs; but they end at once when this group is dropped.

    Within a collective operation of all groups, which is repeated when a group is lost, their collectives go over the
    connections of the ``gossip`` world: those of an attempt that is given up end with it on all ranks.
    """

    gossip: AllGroups | None = None

    @property
    def patience(self) -> timedelta:
        """How long a collective within a step may last."""
        return MOST_TIMEOUTS * self.timeout

    @property
    def is_joint(self) -> bool:
        return self._joint is not None

    @property
    def _joint(self) -> AllGroups | None:
        return self.gossip if self.gossip is not None and self.gossip.is_joint else None

    def wait_for(
        self,
        awaited: Awaited,
        where: str,
        ranks: Callable[[], Sequence[int]],
        *,
        sequence: int | None = None,
    ) -> Failure | None:
        gossip = self.gossip
        if gossip is None or gossip.is_alone:
            return super().wait_for(awaited, where, ranks, sequence=sequence)
        kept = _WhileMember(awaited, gossip)
        return wait_for(kept, self.progress_markers, self.patience, where=where, ranks=ranks, sequence=sequence)

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        if (gossip := self._joint) is None:
            return super().gather_bytes(payload, what)
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
        found = gossip.exchange_in_group(own, what)
        return [payload if row is None else row.numpy().tobytes() for row in found]

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        if (gossip := self._joint) is None:
            super().broadcast_(tensors, what)
            return
        for tensor in tensors:
            own = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() if tensor.numel() else None
            first = gossip.exchange_in_group(own if self.rank == 0 else None, what)[0]
            if first is not None and own is not None:
                tensor.copy_(first.view(tensor.dtype).view(tensor.shape))

    @torch.no_grad()
    def sum_(self, tensor: torch.Tensor, what: str, *, holds_host: bool = True) -> None:
        if (gossip := self._joint) is None:
            super().sum_(tensor, what, holds_host=holds_host)
            return
        own = tensor.detach().cpu().contiguous().view(-1)
        found = gossip.exchange_in_group(own, what)
        rows = [own if row is None else row.view(own.dtype) for row in found]
        tensor.copy_(torch.stack(rows).sum(0).view(tensor.shape))


class _WhileMember:
    """What is awaited for as long as this rank's group is one of those that train."""

    def __init__(self, awaited: Awaited, gossip: AllGroups) -> None:
        self._awaited, self._gossip = awaited, gossip

    @property
    def error(self) -> Exception | None:
        return self._awaited.error

    def wait(self, timeout: timedelta) -> bool:
        self._gossip.consensus.check()
        return self._awaited.wait(timeout)

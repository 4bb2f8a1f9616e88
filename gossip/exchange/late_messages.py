"""Messages that a step stopped waiting for: they are mixed in when they arrive, so that the mean stays exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gossip.elastic.connections.peer_connection import Key
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange.transport import LateDifference

MOST_LATE = 4
"""The limit of late messages per bucket and rank; with this many outstanding the next one is waited for."""


@dataclass(frozen=True)
class _Awaited:
    """A message that is still to arrive, and what it will be compared with: this rank's own message of that round."""

    member: int
    key: Key
    weight: float
    own: torch.Tensor


class LateMessages:
    """The late messages of one transport.

    The peer has mixed this rank's message of the same round in time, or will do so as late as this rank: what one adds
    the other subtracts, at whatever step. An exchange that is awaited waits for its messages for ``soft_deadline_s``,
    or, with None, until all are there.
    """

    def __init__(self, world: ElasticWorld, soft_deadline_s: float | None) -> None:
        self._world = world
        self.soft_deadline_s = soft_deadline_s
        self._awaited: defaultdict[int, list[_Awaited]] = defaultdict(list)

    def await_later(self, bucket: int, member: int, key: Key, weight: float, own: torch.Tensor) -> bool:
        """Mix in a message when it arrives, relative to a copy of ``own``; return False if too many of it are late."""
        awaited = self._awaited[bucket]
        if sum(late.member == member for late in awaited) >= MOST_LATE:
            return False
        awaited.append(_Awaited(member, key, weight, own.clone()))
        return True

    def arrived(self, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
        """Yield the late messages of a bucket that have arrived, each once; with ``waits``, all that will arrive."""
        awaited = self._awaited[bucket]
        if not awaited:
            return
        mesh = self._world.mesh
        found: list[tuple[_Awaited, torch.Tensor]] = []

        def look() -> bool:
            for late in list(awaited):
                payload = mesh.take(late.member, late.key)
                is_right = payload is not None and mesh.is_of_size(late.member, late.key, payload, late.own.nbytes)
                if payload is not None and is_right:
                    found.append((late, payload))
                if is_right or (late.member in mesh.lost and late.member not in mesh.left):
                    awaited.remove(late)
            return not (awaited and waits)

        def missing() -> Sequence[int]:
            return sorted({late.member for late in awaited})

        step = awaited[0].key.first
        num_loaded, _, _ = self._world.consensus.position
        where = f"step {step}, bucket {bucket}: a late message"
        self._world.wait_until(look, missing, where, is_sent_at=(num_loaded, step + 1, 0))
        for late, payload in found:
            message = payload.view(late.own.dtype).to(late.own.device)
            difference = message.double().sub_(late.own).mul_(late.weight)
            yield LateDifference(late.key.first, difference)
            mesh.give_back([payload])  # for float64 the difference was computed in its memory

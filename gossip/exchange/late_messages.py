"""Messages that a step stopped waiting for: they are mixed in when they arrive, so that the mean stays exact."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gossip.elastic.connections.peer_connection import Key
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange.message_notes import note
from gossip.exchange.recording import Missed
from gossip.exchange.transport import LateDifference, SoftDeadline

MOST_LATE = 4
"""The limit of late messages per bucket and rank; with this many outstanding the next one is waited for."""
_NUM_DELAYS, _LEAST_DELAYS = 64, 8
_NUM_SPREADS = 5.0


@dataclass(frozen=True)
class _Awaited:
    """A message that is still to arrive, and what it will be compared with: this rank's own message of that round."""

    member: int
    key: Key
    weight: float
    own: torch.Tensor
    sent_at: float


class LateMessages:
    """The late messages of one transport.

    The peer has mixed this rank's message of the same round in time, or will do so as late as this rank: what one adds
    the other subtracts, at whatever step.

    With "auto" an exchange waits for its messages until they usually are there: counted from when this rank has sent
    its own, the median of the last 64 of that peer and bucket, and five times their median absolute deviation; of peers
    with fewer than 8 those of all peers, and as long as it takes while these are fewer. What a peer sends late counts
    as well, so one that is always late is waited for. What is known of the peers outlives a generation: it is that of
    the late messages ``before``.
    """

    def __init__(self, world: ElasticWorld, soft_deadline_s: SoftDeadline, before: LateMessages | None = None) -> None:
        self._world = world
        self._soft_deadline_s = soft_deadline_s
        self._awaited: defaultdict[int, list[_Awaited]] = defaultdict(list)
        self._delays: defaultdict[tuple[int, int | None], deque[float]]  # by bucket and member, None for all of them
        self._delays = before._delays if before is not None else defaultdict(partial(deque, maxlen=_NUM_DELAYS))

    def ends_at(self, bucket: int, sent_at: float, members: Sequence[int]) -> float | None:
        """Return until when (``time.monotonic()``) an exchange that is needed now waits; None for any time."""
        if not isinstance(self._soft_deadline_s, str):
            return None if self._soft_deadline_s is None else time.monotonic() + self._soft_deadline_s
        of_all = self._delays[bucket, None]
        if not members or len(of_all) < _LEAST_DELAYS:
            return None
        recent = (self._delays[bucket, member] for member in members)
        return sent_at + max(_usual(delays if len(delays) >= _LEAST_DELAYS else of_all) for delays in recent)

    def note_arrival(self, bucket: int, member: int, sent_at: float) -> None:
        """Note that a member's message is there, to which this rank has sent its own at that time."""
        if self._soft_deadline_s == "auto":
            delay = time.monotonic() - sent_at
            self._delays[bucket, member].append(delay)
            self._delays[bucket, None].append(delay)

    def await_later(self, bucket: int, member: int, key: Key, weight: float, own: torch.Tensor, sent_at: float) -> bool:
        """Mix in a message when it arrives, relative to a copy of ``own``; return False if too many of it are late."""
        awaited = self._awaited[bucket]
        if sum(late.member == member for late in awaited) >= MOST_LATE:
            return False
        awaited.append(_Awaited(member, key, weight, own.clone(), sent_at))
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
                    self.note_arrival(bucket, late.member, late.sent_at)
                if is_right or (late.member in mesh.lost and late.member not in mesh.left):
                    awaited.remove(late)
            return not (awaited and waits)

        step = awaited[0].key.first
        sent_at = self._world.consensus.position[0], step + 1, 0
        where = f"step {step}, bucket {bucket}: a late message"
        self._world.wait_until(look, lambda: sorted({late.member for late in awaited}), where, is_sent_at=sent_at)
        for late, payload in found:
            note("mixed", late.member, self._world.member, late.key, payload)
            message = payload.view(late.own.dtype).to(late.own.device)
            difference = message.double().sub_(late.own).mul_(late.weight)
            yield LateDifference(late.key.first, difference, partial(self._record, bucket, late))
            mesh.give_back([payload])  # for float64 the difference was computed in its memory

    def _record(self, bucket: int, late: _Awaited, is_read: bool) -> None:
        entered = self._world.consensus.position[1]
        self._world.record(Missed(self._world.member, late.key.first, bucket, late.member, entered, is_read))


def _usual(delays: Sequence[float]) -> float:
    median = statistics.median(delays)
    return median + _NUM_SPREADS * statistics.median(abs(delay - median) for delay in delays)

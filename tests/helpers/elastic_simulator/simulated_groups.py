"""A shard group's ranks as they are simulated: what they send each other within their steps has connections of its own.

Within collective operations of all groups it is the library that carries it.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

from elastic_simulator.virtual_network import Network
from elastic_simulator.virtual_time import Process, Scheduler, Thread
from gossip.communication.waiting import Awaited
from gossip.communication.world import World
from gossip.elastic.shard_group_world import ShardGroupWorld
from gossip.errors import ExchangeError

_GLANCE = timedelta(seconds=0.02)
_PAUSE_S = 0.02


class GroupConnections:
    """What the processes of a group have sent each other, by the number of the collective and the receiver's place."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self.scheduler, self._network = scheduler, network
        self.processes: list[Process] = []
        self._arrived: defaultdict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
        self._waiting: dict[int, Thread] = {}
        self._num_sent = defaultdict[int, int](int)

    def gather(self, place: int, payload: bytes) -> Gathered:
        """Send ``payload`` to the others, and return what is awaited."""
        number = self._num_sent[place] = self._num_sent[place] + 1
        self._arrived[number, place][place] = payload
        for other in range(len(self.processes)):
            if other != place:
                due = self.scheduler.now + self._network.link(self.processes[place], self.processes[other]).delay
                self.scheduler.at(due, lambda to=other: self._deliver(number, place, to, payload))
        return Gathered(self, number, place)

    def _deliver(self, number: int, place: int, to: int, payload: bytes) -> None:
        if self._network.link(self.processes[place], self.processes[to]).is_cut:
            if self.processes[place].is_alive and self.processes[to].is_alive:
                self.scheduler.at(self.scheduler.now + _PAUSE_S, lambda: self._deliver(number, place, to, payload))
            return
        self._arrived[number, to][place] = payload
        if to in self._waiting:
            self.scheduler.wake(self._waiting.pop(to))

    def is_closed(self, number: int, place: int) -> bool:
        """Return whether a process that has not sent its part has ended, and this is known at the ``place``."""
        own = self.processes[place]
        return any(
            not each.is_alive and self._num_sent[other] < number and not self._network.link(each, own).is_cut
            for other, each in enumerate(self.processes)
        )

    def wait(self, number: int, place: int, duration: float) -> list[bytes] | None:
        """Wait for what the others send, and return it, by place, if it is all there."""
        arrived = self._arrived[number, place]
        if len(arrived) < len(self.processes) and not self.is_closed(number, place):
            self._waiting[place] = self.scheduler.current
            self.scheduler.wait(duration)
            self._waiting.pop(place, None)
        return [arrived[each] for each in sorted(arrived)] if len(arrived) == len(self.processes) else None


class Gathered:
    """What a rank waits for in a collective of its group."""

    def __init__(self, connections: GroupConnections, number: int, place: int) -> None:
        self._connections, self._number, self._place = connections, number, place
        self.found: list[bytes] | None = None

    @property
    def error(self) -> Exception | None:
        is_lost = self.found is None and self._connections.is_closed(self._number, self._place)
        return ConnectionError("connection closed") if is_lost else None

    def wait(self, timeout: timedelta) -> bool:
        self.found = self._connections.wait(self._number, self._place, timeout.total_seconds())
        return self.found is not None or self.error is not None


class _PlainGroup(World):
    """The plain collectives of the ranks of a shard group."""

    connections: GroupConnections

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        awaited = self.connections.gather(self.rank, payload)
        failure: Any = self.wait_for(awaited, what, lambda: self.others)
        if failure is not None:
            raise ExchangeError(f"{what}: {failure} within the shard group")
        assert awaited.found is not None
        return awaited.found

    def wait_for(self, awaited: Awaited, *_: object, **__: object) -> Any:
        return wait_for(self.connections.scheduler, awaited, None, self.timeout)


class SimulatedGroup(ShardGroupWorld, _PlainGroup):
    """The ranks of a shard group, of which this one has the place ``rank``."""

    def __init__(self, rank: int, connections: GroupConnections, timeout: timedelta) -> None:
        self.rank, self.world_size, self.timeout = rank, len(connections.processes), timeout
        self.connections = connections
        self.progress_markers: Any = None


def wait_for(scheduler: Scheduler, awaited: Awaited, _: object, timeout: timedelta, **__: object) -> str | None:
    """Wait as :func:`gossip.communication.waiting.wait_for` does, but for the search for the cause of a failure."""
    ends_at = scheduler.now + timeout.total_seconds()
    while not awaited.wait(_GLANCE):
        if scheduler.now > ends_at:
            return "timed out"
    if awaited.error is None:
        return None
    scheduler.wait(scheduler.random.random() * 0.3)
    return "the connection is closed"

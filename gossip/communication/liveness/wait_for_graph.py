"""The ranks that all others wait for, found by following which rank waits for which."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossip.communication.liveness.process_liveness import GONE, SUSPENDED

_NUM_HOPS_TOLD = 4
_GAVE_UP, _WAITING, _SILENT = "gave up", "waiting", "silent"


class Arrival(NamedTuple):
    """The newest note of a rank: where it has arrived, for whom it waits, or why it has given up."""

    sequence: int  # the number of collectives that it had called
    what: str  # the latest of them
    gave_up: bool = False  # it has stopped waiting and will not continue
    waits_in: str = ""  # where it has been waiting for long; empty if it has had no long wait since
    waits_for: Sequence[int] = ()
    beat: int = 0  # increases for as long as it waits
    blames: Sequence[int] = ()  # if it has given up: the ranks that caused this
    reason: str = ""  # and why, in words


class Sighting(NamedTuple):
    """What this rank knows about another rank: its newest note, whether that changed a moment ago, and its process.

    ``state`` is as :meth:`gossip.communication.liveness.progress_markers.ProgressMarkers.state_of` returns it.
    """

    arrival: Arrival | None
    is_fresh: bool = False
    state: str = ""
    pid: int = 0

    @property
    def kind(self) -> str:
        """``GONE``, ``SUSPENDED``, or what the rank itself has said, if it has: a cause comes before its effects."""
        arrival = self.arrival
        if arrival is not None and arrival.gave_up and (arrival.blames or not self.state):
            return _GAVE_UP
        if self.state:
            return self.state
        return _WAITING if arrival is not None and arrival.waits_in and self.is_fresh else _SILENT


class Verdict(NamedTuple):
    """The ranks that have stopped.

    Attributes
    ----------
    failed_ranks : tuple of int
        The ranks; empty if they are unknown.
    reason : str
        The reason in words, even if the ranks are unknown.
    is_certain : bool
        Whether a moment later the verdict would be the same.
    ends_wait : bool
        Whether it is pointless to wait longer.
    source : int or None
        The rank that found out, if not this one.
    """

    failed_ranks: tuple[int, ...]
    reason: str
    is_certain: bool = False
    ends_wait: bool = False
    source: int | None = None

    @property
    def text(self) -> str:
        """The reason, and the rank that found it."""
        return self.reason + (f" (so rank {self.source} found)" if self.source is not None else "")


def find_blocking_ranks(
    rank: int,
    where: str,
    awaited: Sequence[int],
    sightings: Mapping[int, Sighting],
    *,
    sequence: int,
    is_collective: bool,
) -> Verdict:
    """Follow the chains from this rank to the ranks that wait for nobody.

    ``sequence`` is the number of collectives that this rank has called, and ``is_collective`` whether it waits in one
    of them; ranks that have called fewer are then absent. ``sightings`` are of all other ranks.
    """
    reached_from: dict[int, int] = dict.fromkeys(awaited, rank)
    ends: defaultdict[str, list[int]] = defaultdict(list)  # of the chains, by kind
    queue = list(awaited)
    for other in queue:
        kind, arrival = sightings[other].kind, sightings[other].arrival
        ends[kind].append(other)
        for further in arrival.waits_for if arrival is not None and kind == _WAITING else ():
            if further != rank and further not in reached_from:
                reached_from[further] = other
                queue.append(further)

    def verdict_on(ranks: Sequence[int]) -> Verdict:
        texts = [
            _describe(other, sightings[other])
            + _last_seen(sightings[other].arrival, sequence, is_collective=is_collective)
            + _hops(other, rank, reached_from, sightings)
            for other in ranks
        ]
        return Verdict(tuple(ranks), "; ".join(texts))

    if gone := ends[GONE]:
        # What a process sent before it ended might still be on its way.
        nothing_comes = is_collective and any(_is_behind(sightings[other].arrival, sequence) for other in gone)
        return verdict_on(gone)._replace(is_certain=True, ends_wait=nothing_comes)
    if ends[_GAVE_UP]:
        return _passed_on(ends[_GAVE_UP], rank, sightings)
    if ends[SUSPENDED]:
        return verdict_on(ends[SUSPENDED])._replace(is_certain=True)
    if silent := ends[_SILENT]:
        absent = [other for other in silent if is_collective and _is_behind(sightings[other].arrival, sequence)]
        return verdict_on(absent or silent)
    return Verdict((), _cycle(where, ends[_WAITING], sightings))


def _is_behind(arrival: Arrival | None, sequence: int) -> bool:
    return arrival is None or arrival.sequence < sequence


def _describe(rank: int, sighting: Sighting) -> str:
    if sighting.state == GONE:
        return f"rank {rank} is gone: its process {sighting.pid} has ended"
    if sighting.state == SUSPENDED:
        return f"rank {rank} is frozen: its process {sighting.pid} is suspended (SIGSTOP, or a debugger)"
    return f"rank {rank} is absent (dead, frozen, cut off or busy)"


def _last_seen(arrival: Arrival | None, sequence: int, *, is_collective: bool) -> str:
    if arrival is None:
        return "; it was never seen"
    if is_collective:
        return f"; it was last seen in {arrival.what!r}"
    return f"; it is now in {arrival.what!r}" if arrival.sequence > sequence else ""


def _hops(rank: int, start: int, reached_from: Mapping[int, int], sightings: Mapping[int, Sighting]) -> str:
    """Describe which ranks wait for the rank, if that is not only this rank."""
    hops: list[str] = []
    while (waiter := reached_from[rank]) != start and len(hops) < _NUM_HOPS_TOLD:
        arrival = sightings[waiter].arrival
        hops.append(f"rank {waiter} waits for rank {rank}" + (f" in {arrival.waits_in}" if arrival else ""))
        rank = waiter
    return f" ({', '.join(reversed(hops))})" if hops else ""


def _passed_on(ranks: Sequence[int], rank: int, sightings: Mapping[int, Sighting]) -> Verdict:
    """Return the verdict of ranks that gave up, which saw the cause earlier or more directly."""
    arrivals = {other: arrival for other in ranks if (arrival := sightings[other].arrival) is not None}
    knowing = {other: arrival for other, arrival in arrivals.items() if arrival.blames}
    if not knowing:
        texts = [f"rank {other} has given up waiting in {arrival.what!r}" for other, arrival in arrivals.items()]
        return Verdict((), "; ".join(texts), is_certain=True, ends_wait=True)
    source, arrival = next(iter(knowing.items()))
    failed_ranks = tuple(other for other in arrival.blames if other != rank)
    return Verdict(failed_ranks, arrival.reason, is_certain=True, ends_wait=True, source=source)


def _cycle(where: str, ranks: Sequence[int], sightings: Mapping[int, Sighting]) -> str:
    waits = {other: arrival.waits_in for other in ranks if (arrival := sightings[other].arrival) is not None}
    if all(waits_in == where for waits_in in waits.values()):
        return "all others are waiting too; a connection between two of them is cut"
    return "they wait for each other: " + "; ".join(
        f"rank {other} is now in {waits_in}" for other, waits_in in waits.items() if waits_in != where
    )

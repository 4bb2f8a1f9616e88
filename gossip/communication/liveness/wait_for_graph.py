"""The ranks that all others wait for, found by following which rank waits for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gossip.communication.liveness.process_liveness import GONE, SUSPENDED

_NUM_HOPS_TOLD = 4


@dataclass(frozen=True)
class Arrival:
    """The newest note of a rank.

    Attributes
    ----------
    sequence : int
        The number of collectives that it had called.
    what : str
        The name of the latest collective.
    gave_up : bool
        Whether it has stopped waiting and will not continue.
    waits_in : str
        Where it has been waiting for long; empty if it has had no long wait since.
    waits_for : sequence of int
        The ranks that it waits for.
    beat : int
        A counter that increases for as long as it waits.
    blames : sequence of int
        If it has given up: the ranks that caused this.
    reason : str
        If it has given up: the reason, in words.
    """

    sequence: int
    what: str
    gave_up: bool = False
    waits_in: str = ""
    waits_for: Sequence[int] = ()
    beat: int = 0
    blames: Sequence[int] = ()
    reason: str = ""


@dataclass(frozen=True)
class Sighting:
    """What this rank knows about another rank.

    Attributes
    ----------
    arrival : Arrival or None
        The newest note of the rank.
    is_fresh : bool
        Whether the note changed a moment ago.
    state : str
        The state of its process, see :meth:`gossip.communication.liveness.progress_markers.ProgressMarkers.state_of`.
    pid : int
        The id of its process.
    """

    arrival: Arrival | None
    is_fresh: bool = False
    state: str = ""
    pid: int = 0


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

    Parameters
    ----------
    rank : int
        This rank.
    where : str
        Where it waits.
    awaited : sequence of int
        The ranks that it waits for.
    sightings : mapping
        What is known about all other ranks.
    sequence : int
        The number of collectives that this rank has called.
    is_collective : bool
        Whether it waits in one of them; ranks that have called fewer are then absent.
    """
    reached_from: dict[int, int] = dict.fromkeys(awaited, rank)
    waiting, given_up, gone, suspended, silent = (list[int]() for _ in range(5))  # where the chains end
    queue = list(awaited)
    for other in queue:
        sighting = sightings[other]
        arrival = sighting.arrival
        if arrival is not None and arrival.gave_up and arrival.blames:
            given_up.append(other)
        elif sighting.state == GONE:
            gone.append(other)
        elif sighting.state == SUSPENDED:
            suspended.append(other)
        elif arrival is not None and arrival.gave_up:
            given_up.append(other)
        elif arrival is not None and arrival.waits_in and sighting.is_fresh:
            waiting.append(other)
            for further in arrival.waits_for:
                if further != rank and further not in reached_from:
                    reached_from[further] = other
                    queue.append(further)
        else:
            silent.append(other)

    def verdict_on(ranks: Sequence[int]) -> Verdict:
        texts = [
            _describe(other, sightings[other])
            + _last_seen(sightings[other].arrival, sequence, is_collective=is_collective)
            + _hops(other, rank, reached_from, sightings)
            for other in ranks
        ]
        return Verdict(tuple(ranks), "; ".join(texts))

    if gone:
        # What a process sent before it ended might still be on its way.
        nothing_comes = is_collective and any(_is_behind(sightings[other].arrival, sequence) for other in gone)
        return verdict_on(gone)._replace(is_certain=True, ends_wait=nothing_comes)
    if given_up:
        return _passed_on(given_up, rank, sightings)
    if suspended:
        return verdict_on(suspended)._replace(is_certain=True)
    if silent:
        absent = [other for other in silent if is_collective and _is_behind(sightings[other].arrival, sequence)]
        return verdict_on(absent or silent)
    return Verdict((), _cycle(where, waiting, sightings))


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

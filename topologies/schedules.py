"""Schedules made of schedules: topologies that exchange in every k-th round only, and that follow each other."""

from __future__ import annotations

import bisect
import functools
import itertools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from topologies.round import Round
from topologies.validation import Stochasticity, check_integer

if TYPE_CHECKING:
    from topologies.topology import Topology


@dataclass(frozen=True)
class Phase:
    """The part of a schedule in which one topology runs.

    Parameters
    ----------
    topology
        The topology whose rounds are exchanged; not itself made of phases.
    every
        Round s of the topology is round ``start + every * (s + 1) - 1`` of the schedule, after ``every - 1``
        identity rounds.
    start
        The first round of the phase.
    stop
        The first round after it; ``None``: it never ends.
    """

    topology: Topology
    every: int = 1
    start: int = 0
    stop: int | None = None

    def number_of(self, exchange: int) -> int:
        """Return which round of the schedule the topology's round ``exchange`` is."""
        return self.start + self.every * (exchange + 1) - 1

    def num_distinct(self, *, sampled: int) -> int:
        """Return after how many exchanges they repeat or the phase ends.

        Parameters
        ----------
        sampled
            How many exchanges to count at most of a topology without a period.
        """
        distinct = self.topology.period or sampled
        return distinct if self.stop is None else min(distinct, (self.stop - self.start) // self.every)

    @property
    def symmetric(self) -> bool:
        """Whether every exchange of the phase is symmetric; without a period only if the topology promises it."""
        num_exchanges = self.num_distinct(sampled=1)
        if self.topology.symmetric or not num_exchanges:
            return True
        period = self.topology.period
        if period is None or num_exchanges == period:
            return False
        return all(self.topology.round(exchange).is_symmetric for exchange in range(num_exchanges))


@dataclass(frozen=True)
class Composition:
    """The rounds of phases that follow each other: the first one starts at round 0, only the last one never ends."""

    phases: tuple[Phase, ...]

    def __call__(self, t: int) -> Round:
        phase = self.phases[bisect.bisect_right(self.phases, t, key=lambda phase: phase.start) - 1]
        exchange, local_steps = divmod(t - phase.start + 1, phase.every)
        return _identity(phase.topology.world_size) if local_steps else phase.topology.round(exchange - 1)


def every(topology: Topology, k: int) -> Topology:
    """Return :meth:`Topology.every`."""
    k = check_integer("k", k, minimum=1)
    if k == 1 or topology.world_size == 1:
        return topology
    return _compose(
        replace(
            phase,
            every=phase.every * k,
            start=phase.start * k,
            stop=None if phase.stop is None else phase.stop * k,
        )
        for phase in topology.phases
    )


def then(topology: Topology, other: Topology, after: int) -> Topology:
    """Return :meth:`Topology.then`."""
    from topologies.topology import Topology  # topologies are made of topologies: it cannot come first

    if not isinstance(other, Topology):
        raise TypeError(
            f"other must be a Topology, got {other!r} ({type(other).__name__}); make one with topologies.build(name, "
            f"{topology.world_size})"
        )
    after = check_integer("after", after, minimum=0)
    if other.world_size != topology.world_size:
        raise ValueError(
            f"other is {other.name!r} for {other.world_size} ranks, it is to follow {topology.name!r} for "
            f"{topology.world_size}; build both for the same world_size"
        )
    if after == 0 or topology.world_size == 1:
        return other
    before = (
        replace(phase, stop=after if phase.stop is None else min(phase.stop, after))
        for phase in topology.phases
        if phase.start < after
    )
    behind = (
        replace(phase, start=phase.start + after, stop=None if phase.stop is None else phase.stop + after)
        for phase in other.phases
    )
    return _compose((*before, *behind))


def to_dicts(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Return phases as plain JSON types; :func:`from_dicts` reads them back."""
    return [{"start": phase.start, "every": phase.every, "topology": phase.topology.to_dict()} for phase in phases]


def from_dicts(items: Sequence[Mapping[str, Any]]) -> Topology:
    """Return the topology whose phases :func:`to_dicts` wrote."""
    from topologies.topology import Topology  # as in then

    for item in items:
        if not isinstance(item, Mapping) or set(item) != {"start", "every", "topology"}:
            raise ValueError(
                f"a phase needs the keys start, every and topology, got {reprlib.repr(item)}; pass what "
                f"Topology.to_json() returned"
            )
    starts = [check_integer("start", item["start"], minimum=0) for item in items]
    if starts[:1] != [0] or any(one >= other for one, other in itertools.pairwise(starts)):
        raise ValueError(
            f"phases must start at rising rounds, the first one at 0, got {starts}; pass what Topology.to_json() "
            f"returned"
        )
    parts = [Topology.from_dict(item["topology"]).every(item["every"]) for item in items]
    topology = parts[0]
    for start, part in zip(starts[1:], parts[1:], strict=True):
        topology = topology.then(part, after=start)
    return topology


def _compose(phases: Iterable[Phase]) -> Topology:
    from topologies.topology import Topology  # as in then

    phases = tuple(phases)
    last = phases[-1]
    period = last.topology.period
    return Topology(
        world_size=last.topology.world_size,
        make_round=Composition(phases),
        period=None if period is None else period * last.every,
        stochasticity=_common_stochasticity(phases),
        name=_name(phases),
    )


def _common_stochasticity(phases: Sequence[Phase]) -> Stochasticity:
    """Return what the rounds of all phases keep."""
    weaker = {phase.topology.stochasticity: phase.topology.name for phase in phases}
    weaker.pop("doubly", None)
    if len(weaker) > 1:
        raise ValueError(
            f"topology {weaker['row']!r} is only row-stochastic and {weaker['column']!r} only column-stochastic: no "
            f"algorithm serves both; use doubly stochastic weights for one of them"
        )
    return next(iter(weaker), "doubly")


def _name(phases: Sequence[Phase]) -> str:
    """Return the expression that makes the phases: ``complete.then(ring.every(4), after=100)``."""
    from topologies.topology import brief_options  # as in then

    text = ""
    for phase in phases:
        topology = phase.topology
        options = f"({brief_options(topology.options)})" if topology.registered and topology.options else ""
        part = f"{topology.name}{options}" + (f".every({phase.every})" if phase.every > 1 else "")
        text = f"{text}.then({part}, after={phase.start})" if text else part
    return text


@functools.lru_cache
def _identity(world_size: int) -> Round:
    return Round.identity(world_size)

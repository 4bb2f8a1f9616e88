"""Topologies made of others: in every k-th round, one after the other, in turn, within each other, with moved ranks."""

import functools
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from topologies.matrix_storage import rank_array
from topologies.round import Round
from topologies.schedule import (
    Composition,
    Expression,
    Phase,
    Schedule,
    ScheduleT,
    check_no_warmup,
    check_schedule,
    common_stochasticity,
    expression_text,
)
from topologies.validation import check_integer


def every(topology: ScheduleT, k: int) -> ScheduleT:
    """Return the schedule with k - 1 local steps before each exchange, for k of at least 1.

    Round s of this topology is round ``k (s + 1) - 1`` of the result: rounds k - 1, 2 k - 1, ... exchange, all
    others are the identity. Warm-up, period and the rounds until all is exact are k times as long. For k = 1,
    and for a single rank, it is the topology itself.

    Examples
    --------
    >>> local_sgd = topologies.build("complete", 4).every(3)
    >>> [local_sgd.round(t).is_identity for t in range(6)]
    [True, True, False, True, True, False]
    """
    k = check_integer("k", k, minimum=1)
    if k == 1 or topology.world_size == 1:
        return topology
    return _compose(type(topology), (_moved(phase, times=k) for phase in topology.phases))


@dataclass(frozen=True)
class Bursts(Expression):
    """A schedule of which ``rounds`` follow each other every ``k`` rounds, ``apart`` from each other.

    Round r is round ``(r + 1) // rounds * k + (r + 1) % rounds * apart - 1``, and ``start`` of them come before.
    """

    part: Schedule
    k: int
    rounds: int
    apart: int
    start: int

    @property
    def begin(self) -> int:
        """The round with which it begins."""
        return self.start // self.rounds * self.k + self.start % self.rounds * self.apart

    def __call__(self, t: int) -> Round:
        burst, position = divmod(self.begin + t + 1, self.k)
        number, local_steps = divmod(position, self.apart)
        if local_steps or number >= self.rounds:
            return Round.identity(self.part.world_size)
        return self.part.round(burst * self.rounds + number - 1 - self.start)


def in_bursts(topology: ScheduleT, k: int, rounds: int, apart: int) -> ScheduleT:
    """Return the schedule in which several rounds, ``apart`` from each other, follow every k-th one; all fit into k."""
    if rounds == 1 or topology.world_size == 1:
        return every(topology, k)
    phases, name = [], f"{expression_text(topology)}.in_bursts({k}, rounds={rounds}, apart={apart})"
    for phase in topology.phases:
        part = every(phase.topology, phase.every)
        bursts = Bursts(part, k, rounds, apart, phase.start)
        period = None if part.period is None else math.lcm(part.period, rounds) // rounds * k
        schedule = type(topology)(
            world_size=part.world_size, make_round=bursts, period=period, stochasticity=part.stochasticity, name=name
        )
        stop = None if phase.stop is None else replace(bursts, start=phase.stop).begin
        phases.append(Phase(schedule, start=bursts.begin, stop=stop))
    return phases[0].topology if len(phases) == 1 else _compose(type(topology), phases)


def then(topology: ScheduleT, other: ScheduleT, *, after: int) -> ScheduleT:
    """Return the schedule of this topology for some rounds, and of another one from then on.

    Round t is round t of this topology for ``t < after``, and round ``t - after`` of ``other`` from there on.
    The first ``after`` rounds are a warm-up: period and exactness are those of ``other``. For ``after=0``, and
    for a single rank, it is ``other`` itself.

    Not both may be stochastic in one direction only, one by rows and the other one by columns.

    Examples
    --------
    All-reduce for 100 rounds, then a ring:

    >>> topologies.build("complete", 8).then(topologies.build("ring", 8), after=100)
    Topology('complete.then(ring, after=100)', world_size=8, warmup=100, period=1)
    """
    _check_other(topology, other)
    after = check_integer("after", after, minimum=0)
    if after == 0 or topology.world_size == 1:
        return other
    before = (
        replace(phase, stop=after if phase.stop is None else min(phase.stop, after))
        for phase in topology.phases
        if phase.start < after
    )
    behind = (_moved(phase, by=after) for phase in other.phases)
    return _compose(type(topology), (*before, *behind))


def _moved(phase: Phase[ScheduleT], times: int = 1, by: int = 0) -> Phase[ScheduleT]:
    """Return the phase ``times`` as long, and later by so many rounds."""
    stop = None if phase.stop is None else phase.stop * times + by
    return Phase(phase.topology, phase.every * times, phase.start * times + by, stop)


@dataclass(frozen=True)
class Interleaving(Expression):
    """Two schedules in turn: round 2 s is round s of the first, round 2 s + 1 round s of the second."""

    even: Schedule
    odd: Schedule

    def __call__(self, t: int) -> Round:
        return self.parts[t % 2].round(t // 2)


def interleave(topology: ScheduleT, other: ScheduleT) -> ScheduleT:
    """Return the schedule in which this topology and another one take turns.

    Round 2 s is round s of this topology, round 2 s + 1 round s of ``other``. The period is twice the least
    common multiple of both. It takes a topology of as many ranks; neither of the two may have a warm-up.

    Examples
    --------
    >>> rings = topologies.build("one_peer_ring", 8).interleave(topologies.build("one_peer_hypercube", 8))
    >>> rings.period, rings.round(3).neighbours(0)
    (12, {2: 0.5})
    """
    _check_other(topology, other)
    parts = (topology, other)
    check_no_warmup("interleave", parts)
    periods = [part.period for part in parts]
    return type(topology)(
        world_size=topology.world_size,
        make_round=Interleaving(*parts),
        period=None if None in periods else 2 * math.lcm(*filter(None, periods)),
        stochasticity=common_stochasticity(parts),
        name=f"{expression_text(topology)}.interleave({expression_text(other)})",
    )


@dataclass(frozen=True)
class Averaging(Expression):
    """A schedule in every k-th round of which all ranks average; round 0 is number ``offset`` of k."""

    part: Schedule
    k: int
    offset: int = 0

    def __call__(self, t: int) -> Round:
        is_average = (t + self.offset + 1) % self.k == 0
        return _average(self.part.world_size) if is_average else self.part.round(t)


def averaged_every(topology: ScheduleT, k: int) -> ScheduleT:
    """Return the schedule in which all ranks average in every k-th round.

    Rounds k - 1, 2 k - 1, ... are the exact average, W = J; round t is round t of this topology for all others.
    The period of a part that repeats becomes the least common multiple of its own and k. For a single rank it is the
    topology itself.

    References
    ----------
    Chen et al., "Accelerating gossip SGD with periodic global averaging", ICML 2021.

    Examples
    --------
    >>> ring = topologies.build("ring", 6).averaged_every(4)
    >>> [ring.round(t).uniform_groups is not None for t in range(8)], ring.exact_after
    ([False, False, False, True, False, False, False, True], 4)
    """
    k = check_integer("k", k, minimum=1)
    if topology.world_size == 1:
        return topology
    if len(topology.phases) == 1:
        return averaging(topology, k, 0)
    return _compose(
        type(topology),
        (
            replace(phase, topology=averaging(every(phase.topology, phase.every), k, phase.start % k), every=1)
            for phase in topology.phases
        ),
    )


def averaging(topology: ScheduleT, k: int, offset: int) -> ScheduleT:
    """Return the schedule without warm-up whose rounds t are averages where k divides ``t + offset + 1``."""
    known = topology.promised_exact_after
    return type(topology)(
        world_size=topology.world_size,
        make_round=Averaging(topology, k, offset),
        period=None if topology.period is None else math.lcm(topology.period, k),
        stochasticity=topology.stochasticity,
        promised_exact_after=(k if known is None else min(k, known)) if topology.doubly_stochastic else None,
        name=f"{expression_text(topology)}.averaged_every({k})",
    )


@dataclass(frozen=True)
class Permutation(Expression):
    """A schedule in which rank ``order[place]`` does what rank ``place`` does in another one."""

    topology: Schedule
    order: tuple[int, ...]

    def __call__(self, t: int) -> Round:
        return _relabelled(self.topology.round(t), self.order)


def permuted(topology: ScheduleT, order: Sequence[int]) -> ScheduleT:
    """Return the same schedule with the ranks in other places.

    Rank ``order[place]`` does what rank ``place`` does in this topology: for a ring, ``order`` is that in which it
    passes the ranks. It names every rank once.

    Examples
    --------
    >>> topologies.build("ring", 4).permuted([0, 2, 1, 3]).round(0).peers(0)
    (2, 3)
    """
    ranks = rank_array("order", order, topology.world_size)
    if not np.array_equal(np.sort(ranks), np.arange(topology.world_size)):
        raise ValueError(
            f"order must name every rank from 0 to {topology.world_size - 1} once, got {reprlib.repr(order)}; "
            f"order[place] is the rank that takes that place"
        )
    if isinstance(topology.make_round, Composition):
        parts = (replace(phase, topology=permuted(phase.topology, order)) for phase in topology.phases)
        return _compose(type(topology), parts)
    permutation = Permutation(topology, tuple(ranks.tolist()))
    name = f"{expression_text(topology)}.permuted"
    return replace(topology, make_round=permutation, name=name, options={}, registered=False)


def _relabelled(round_: Round, order: tuple[int, ...]) -> Round:
    place_of = np.argsort(order)

    def row(rank: int) -> dict[int, float]:
        return dict(sorted((order[other], weight) for other, weight in round_.row(int(place_of[rank])).items()))

    def readers(rank: int) -> tuple[int, ...]:
        return tuple(sorted(order[other] for other in round_.targets(int(place_of[rank]))))

    def whole() -> Round:
        if round_.uniform_groups is not None:  # their rows have as many weights as pairs
            return Round.from_groups(len(order), [[order[rank] for rank in group] for group in round_.groups])
        return Round.from_rows([row(rank) for rank in range(len(order))])

    return Round.from_formula(len(order), row, readers=readers, whole=whole)


@dataclass(frozen=True)
class Product(Expression):
    """Round t is the Kronecker product of the rounds t of both; rank = machine * local_size + local rank."""

    machines: Schedule
    local: Schedule

    def __call__(self, t: int) -> Round:
        return _kronecker(self.machines.round(t), self.local.round(t))


def product(machines: ScheduleT, local: ScheduleT) -> ScheduleT:
    """Return the Kronecker product: this topology between machines, ``local`` between the ranks of each.

    Rank ``machine * local.world_size + place`` reads rank ``other * local.world_size + there`` with the weight
    ``W[machine, other] * local W[place, there]`` of round t of both. The period is the least common multiple;
    exact once both are. Neither of the two may have a warm-up.

    Examples
    --------
    Three machines in a ring; the two ranks of each work as one:

    >>> topology = topologies.build("ring", 3).product(topologies.build("complete", 2))
    >>> topology.world_size, topology.round(0).self_weight(0)
    (6, 0.16666666666666666)
    """
    check_schedule("local", local, machines.world_size)
    parts = (machines, local)
    check_no_warmup("product", parts)
    periods = [part.period for part in parts]
    promises = [part.promised_exact_after for part in parts]
    return type(machines)(
        world_size=machines.world_size * local.world_size,
        make_round=Product(*parts),
        period=None if None in periods else math.lcm(*filter(None, periods)),
        stochasticity=common_stochasticity(parts),
        promised_exact_after=None if None in promises else max(filter(None, promises)),
        name=f"{expression_text(machines)}.product({expression_text(local)})",
    )


def _kronecker(machines: Round, local: Round) -> Round:
    local_size = local.world_size
    world_size = machines.world_size * local_size

    def row(rank: int) -> dict[int, float]:
        machine, place = divmod(rank, local_size)
        weights = {
            other * local_size + there: outer * inner
            for other, outer in machines.row(machine).items()
            for there, inner in local.row(place).items()
        }
        return {other: weights[other] for other in sorted(weights) if weights[other] or other == rank}

    def readers(rank: int) -> tuple[int, ...]:
        machine, place = divmod(rank, local_size)
        outer = [*machines.targets(machine), *[machine] * bool(machines.self_weight(machine))]
        inner = [*local.targets(place), *[place] * bool(local.self_weight(place))]
        return tuple(sorted({other * local_size + there for other in outer for there in inner} - {rank}))

    def whole() -> Round:
        if machines.uniform_groups is not None and local.uniform_groups is not None:
            groups = [
                [machine * local_size + place for machine in outer for place in inner]
                for outer in machines.uniform_groups
                for inner in local.uniform_groups
            ]
            return Round.from_groups(world_size, groups)
        return Round.from_rows([row(rank) for rank in range(world_size)])

    return Round.from_formula(world_size, row, readers=readers, whole=whole)


def _compose(kind: type[ScheduleT], phases: Iterable[Phase[ScheduleT]]) -> ScheduleT:
    composition = Composition(tuple(phases))
    last = composition.phases[-1]
    period, exact_after = last.topology.period, last.topology.promised_exact_after
    return kind(
        world_size=last.topology.world_size,
        make_round=composition,
        period=None if period is None else period * last.every,
        stochasticity=common_stochasticity(composition.parts),
        promised_exact_after=None if exact_after is None else exact_after * last.every,
        name=_name(composition.phases),
    )


def _name(phases: Sequence[Phase[Any]]) -> str:
    """Return the expression that makes the phases: ``complete.then(ring.every(4), after=100)``."""
    text = ""
    for phase in phases:
        part = expression_text(phase.topology) + (f".every({phase.every})" if phase.every > 1 else "")
        text = f"{text}.then({part}, after={phase.start})" if text else part
    return text


def _check_other(topology: Schedule, other: Schedule) -> None:
    check_schedule("other", other, topology.world_size)
    if other.world_size != topology.world_size:
        raise ValueError(
            f"other is {other.name!r} for {other.world_size} ranks, it is to follow {topology.name!r} for "
            f"{topology.world_size}; build both for the same world_size"
        )


@functools.lru_cache
def _average(world_size: int) -> Round:
    return Round.from_groups(world_size, [range(world_size)])

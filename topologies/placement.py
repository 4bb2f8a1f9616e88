"""Where ranks stand: the Kronecker product of machines and their local ranks, and other orders of the ranks."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topologies.array_arguments import rank_array
from topologies.round import Round
from topologies.schedule import (
    Expression,
    Schedule,
    ScheduleT,
    check_no_warmup,
    check_schedule,
    common_stochasticity,
    expression_text,
)


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

    >>> import topologies
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


@dataclass(frozen=True)
class Permutation(Expression):
    """A schedule in which rank ``order[place]`` does what rank ``place`` does in another one."""

    topology: Schedule
    order: tuple[int, ...]

    def __call__(self, t: int) -> Round:
        return _relabelled(self.topology.round(t), self.order)


def permuted(topology: ScheduleT, order: Sequence[int]) -> ScheduleT:
    """Return :meth:`Topology.permuted`; not for a topology made of phases, whose phases are permuted one by one."""
    return type(topology)(
        world_size=topology.world_size,
        make_round=Permutation(topology, _check_order(order, topology.world_size)),
        period=topology.period,
        stochasticity=topology.stochasticity,
        promised_symmetric=topology.promised_symmetric,
        promised_exact_after=topology.promised_exact_after,
        name=f"{expression_text(topology)}.permuted",
    )


def _check_order(order: Sequence[int], world_size: int) -> tuple[int, ...]:
    ranks = rank_array("order", order, world_size)
    if not np.array_equal(np.sort(ranks), np.arange(world_size)):
        raise ValueError(
            f"order must name every rank from 0 to {world_size - 1} once, got {reprlib.repr(order)}; order[place] is "
            f"the rank that takes that place"
        )
    return tuple(ranks.tolist())


def _relabelled(round_: Round, order: tuple[int, ...]) -> Round:
    place_of = np.argsort(order)

    def row(rank: int) -> dict[int, float]:
        return dict(sorted((order[other], weight) for other, weight in round_.row(int(place_of[rank])).items()))

    def readers(rank: int) -> tuple[int, ...]:
        return tuple(sorted(order[other] for other in round_.targets(int(place_of[rank]))))

    def whole() -> Round:
        if round_.uniform_groups is not None:
            return Round.from_groups(len(order), [[order[rank] for rank in group] for group in round_.groups])
        return Round.from_rows([row(rank) for rank in range(len(order))])

    return Round.from_formula(len(order), row, readers=readers, whole=whole)

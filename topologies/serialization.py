"""Topologies as plain JSON types, and back, for as many ranks or for others."""

import itertools
import reprlib
from collections.abc import Mapping
from typing import Any

from topologies import compositions
from topologies.family_registry import build_family
from topologies.round import Round
from topologies.schedule import Composition, Schedule, ScheduleT
from topologies.validation import check_world_size

#: What to do about data that are not those of a topology.
_WRITTEN = "pass what Topology.to_json() returned"


def to_dict(topology: Schedule) -> dict[str, Any]:
    """Return the topology as plain JSON types; see :meth:`Topology.to_json`."""
    match topology.make_round:
        case Composition(phases):
            return {
                "phases": [
                    {"start": phase.start, "every": phase.every, "topology": to_dict(phase.topology)}
                    for phase in phases
                ]
            }
        case compositions.Interleaving(even, odd):
            return {"interleave": [to_dict(even), to_dict(odd)]}
        case compositions.Averaging(part, k, offset):
            return {"averaged": to_dict(part), "every": k, "offset": offset}
        case compositions.Product(machines, local):
            return {"product": [to_dict(machines), to_dict(local)]}
        case compositions.Permutation(part, order):
            return {"permuted": to_dict(part), "order": list(order)}
    data: dict[str, Any] = {"name": topology.name, "world_size": topology.world_size}
    if topology.registered:
        return data | {"options": dict(topology.options)}
    if topology.period is None:
        raise ValueError(
            f"topology {topology.name!r} computes its rounds by a function without a period, so JSON cannot hold "
            f"it; register the function as a family with topologies.register, or give it a period"
        )
    rounds = [topology.round(t).to_dict() for t in range(topology.period)]
    return data | {"stochasticity": topology.stochasticity, "rounds": rounds}


def from_dict(kind: type[ScheduleT], data: Mapping[str, Any]) -> ScheduleT:
    """Return the schedule that :func:`to_dict` wrote, made of schedules of the class ``kind``."""
    try:
        return _from_dict(kind, data)
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"this is no topology ({type(error).__name__}: {error}); {_WRITTEN}") from error


def _from_dict(kind: type[ScheduleT], data: Mapping[str, Any]) -> ScheduleT:
    match data:
        case {"name": name, "world_size": world_size, "options": options, **rest} if not rest:
            return build_family(kind, name, world_size, **options)
        case {"name": name, "world_size": world_size, "stochasticity": stochasticity, "rounds": rounds, **rest} if (
            not rest
        ):
            topology = kind.from_rounds(map(Round.from_dict, rounds), stochasticity=stochasticity, name=name)
            if topology.world_size != world_size:
                raise ValueError(
                    f"world_size is {world_size}, but the rounds are for {topology.world_size}; {_WRITTEN}"
                )
            return topology
        case {"phases": phases}:
            return _from_phases(kind, phases)
        case {"interleave": [even, odd]}:
            return compositions.interleave(_from_dict(kind, even), _from_dict(kind, odd))
        case {"averaged": part, "every": k, "offset": offset}:
            return compositions.averaging(_from_dict(kind, part), k, offset)
        case {"product": [machines, local]}:
            return compositions.product(_from_dict(kind, machines), _from_dict(kind, local))
        case {"permuted": part, "order": order}:
            return compositions.permuted(_from_dict(kind, part), order)
    raise ValueError(
        f"a topology needs the keys name and world_size, and options, or stochasticity and rounds; or those of an "
        f"expression: phases, interleave, product, averaged and every and offset, or permuted and order; got "
        f"{reprlib.repr(data)}; {_WRITTEN}"
    )


def _from_phases(kind: type[ScheduleT], phases: list[dict[str, Any]]) -> ScheduleT:
    starts = [phase["start"] for phase in phases]
    if starts[:1] != [0] or any(one >= other for one, other in itertools.pairwise(starts)):
        raise ValueError(f"phases must start at rising rounds, the first one at 0, got {starts}; {_WRITTEN}")
    topology, *later = (compositions.every(_from_dict(kind, phase["topology"]), phase["every"]) for phase in phases)
    for start, part in zip(starts[1:], later, strict=True):
        topology = compositions.then(topology, part, after=start)
    return topology


def resized(topology: ScheduleT, world_size: int) -> ScheduleT:
    """Return the same topology for another number of ranks: each family that it is made of, with its options.

    What was made for its own ranks, by rounds, as a product or permuted, is refused.

    Examples
    --------
    >>> topologies.build("one_peer_exponential", 8).every(2).resized(5).name
    'one_peer_exponential.every(2)'
    """
    world_size = check_world_size(world_size)
    if world_size == topology.world_size:
        return topology

    def resize(data: Any) -> Any:
        match data:
            case {"options": _}:
                return data | {"world_size": world_size}
            case {"rounds": _} | {"product": _} | {"permuted": _}:
                raise ValueError(
                    f"topology {topology.name!r} was made for {topology.world_size} ranks by rounds, a product or a "
                    f"permutation of its own, so that it cannot be built for {world_size}; register a family with "
                    f"topologies.register, or name another topology"
                )
            case dict():
                return {key: resize(value) for key, value in data.items()}
            case list():
                return [resize(value) for value in data]
        return data

    return from_dict(type(topology), resize(to_dict(topology)))

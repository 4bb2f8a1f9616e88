"""Topologies as plain JSON types, and back, for as many ranks or for others."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any

from topologies.compositions import Averaging, Composition, Interleaving, averaging, every, interleave, permuted, then
from topologies.family_registry import build_family
from topologies.placement import Permutation, Product, product
from topologies.plain_data import thawed
from topologies.round import Round
from topologies.schedule import Phase, Schedule, ScheduleT
from topologies.validation import check_integer, check_world_size

#: What to do about data that are not those of a topology.
_WRITTEN = "pass what Topology.to_json() returned"


def to_dict(topology: Schedule) -> dict[str, Any]:
    """Return the topology as plain JSON types.

    Raises
    ------
    ValueError
        For a schedule from a function without a period: it has no end to write down.
    """
    match topology.make_round:
        case Composition(phases):
            return {"phases": [_phase_to_dict(phase) for phase in phases]}
        case Interleaving(even, odd):
            return {"interleave": [to_dict(even), to_dict(odd)]}
        case Averaging(part, k, offset):
            return {"averaged": to_dict(part), "every": k, "offset": offset}
        case Product(machines, local):
            return {"product": [to_dict(machines), to_dict(local)]}
        case Permutation(part, order):
            return {"permuted": to_dict(part), "order": list(order)}
    data: dict[str, Any] = {"name": topology.name, "world_size": topology.world_size}
    if topology.registered:
        return data | {"options": thawed(topology.options)}
    if topology.period is None:
        raise ValueError(
            f"topology {topology.name!r} computes its rounds by a function without a period, so JSON cannot hold "
            f"it; register the function as a family with topologies.register, or give it a period"
        )
    data["stochasticity"] = topology.stochasticity
    data["rounds"] = [topology.round(t).to_dict() for t in range(topology.period)]
    return data


def from_dict(kind: type[ScheduleT], data: Mapping[str, Any]) -> ScheduleT:
    """Return the schedule that :func:`to_dict` wrote, made of schedules of the class ``kind``.

    Raises
    ------
    ValueError
        If the data are not those of a topology, or the family is not registered.
    """
    try:
        return _from_dict(kind, data)
    except RecursionError:
        raise ValueError(f"the topology is nested too deeply to be read; {_WRITTEN}") from None


def _from_dict(kind: type[ScheduleT], data: Mapping[str, Any]) -> ScheduleT:
    keys = sorted(map(str, data)) if isinstance(data, Mapping) else []
    match keys:
        case ["name", "options", "world_size"]:
            options = _checked("options", data["options"], Mapping, "a mapping")
            return build_family(kind, _name_of(data), data["world_size"], **options)
        case ["name", "rounds", "stochasticity", "world_size"]:
            return _from_rounds(kind, data)
        case ["phases"]:
            return _from_phases(kind, _checked("phases", data["phases"], list | tuple, "a list"))
        case ["interleave"]:
            return interleave(*_two_parts(kind, "interleave", data["interleave"]))
        case ["averaged", "every", "offset"]:
            every_k, offset = (
                check_integer(key, data[key], minimum=minimum) for key, minimum in (("every", 1), ("offset", 0))
            )
            return averaging(_from_dict(kind, data["averaged"]), every_k, offset)
        case ["product"]:
            return product(*_two_parts(kind, "product", data["product"]))
        case ["order", "permuted"]:
            return permuted(
                _from_dict(kind, data["permuted"]), _checked("order", data["order"], list | tuple, "a list")
            )
    raise ValueError(
        f"a topology needs the keys name and world_size, and options, or stochasticity and rounds; or those of an "
        f"expression: phases, interleave, product, averaged and every and offset, or permuted and order; got "
        f"{keys if isinstance(data, Mapping) else reprlib.repr(data)}; {_WRITTEN}"
    )


def _from_rounds(kind: type[ScheduleT], data: Mapping[str, Any]) -> ScheduleT:
    world_size = check_world_size(data["world_size"])
    rounds = [Round.from_dict(item) for item in _checked("rounds", data["rounds"], list | tuple, "a list")]
    for number, round_ in enumerate(rounds):
        if round_.world_size != world_size:
            raise ValueError(
                f"world_size is {world_size}, but rounds[{number}] is for {round_.world_size} ranks; {_WRITTEN}"
            )
    return kind.from_rounds(rounds, stochasticity=data["stochasticity"], name=_name_of(data))


def _two_parts(kind: type[ScheduleT], key: str, parts: Any) -> tuple[ScheduleT, ScheduleT]:
    if len(_checked(key, parts, list | tuple, "a list")) != 2:
        raise ValueError(f"{key} must hold two topologies, got {len(parts)}; {_WRITTEN}")
    return _from_dict(kind, parts[0]), _from_dict(kind, parts[1])


def _name_of(data: Mapping[str, Any]) -> str:
    name: str = _checked("name", data["name"], str, "a text")
    return name


def _checked(key: str, value: Any, kind: type | UnionType, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be {what}, got {reprlib.repr(value)}; {_WRITTEN}")
    return value


def _phase_to_dict(phase: Phase[Any]) -> dict[str, Any]:
    return {"start": phase.start, "every": phase.every, "topology": to_dict(phase.topology)}


def _from_phases(kind: type[ScheduleT], items: Sequence[Mapping[str, Any]]) -> ScheduleT:
    for item in items:
        if not isinstance(item, Mapping) or set(item) != {"start", "every", "topology"}:
            raise ValueError(f"a phase needs the keys start, every and topology, got {reprlib.repr(item)}; {_WRITTEN}")
    starts = [check_integer("start", item["start"], minimum=0) for item in items]
    if starts[:1] != [0] or any(one >= other for one, other in itertools.pairwise(starts)):
        raise ValueError(f"phases must start at rising rounds, the first one at 0, got {starts}; {_WRITTEN}")
    parts = [every(_from_dict(kind, item["topology"]), item["every"]) for item in items]
    topology = parts[0]
    for start, part in zip(starts[1:], parts[1:], strict=True):
        topology = then(topology, part, after=start)
    return topology


def resized(topology: ScheduleT, world_size: int) -> ScheduleT:
    """Return the same topology for another number of ranks: each family that it is made of, with its options.

    Raises
    ------
    ValueError
        If a family, or its options, cannot serve that size, or it was made for its own ranks: by rounds, as a
        product or permuted.

    Examples
    --------
    >>> import topologies
    >>> topologies.build("one_peer_exponential", 8).every(2).resized(5).name
    'one_peer_exponential.every(2)'
    """
    world_size = check_world_size(world_size)
    if world_size == topology.world_size:
        return topology
    return from_dict(type(topology), _resized(to_dict(topology), topology, world_size))


def _resized(data: dict[str, Any], topology: Schedule, world_size: int) -> dict[str, Any]:
    match data:
        case {"options": _, "world_size": _}:
            return data | {"world_size": world_size}
        case {"phases": phases}:
            return {
                "phases": [phase | {"topology": _resized(phase["topology"], topology, world_size)} for phase in phases]
            }
        case {"interleave": parts}:
            return {"interleave": [_resized(part, topology, world_size) for part in parts]}
        case {"averaged": part}:
            return data | {"averaged": _resized(part, topology, world_size)}
    raise ValueError(
        f"topology {topology.name!r} was made for {topology.world_size} ranks by rounds, a product or a permutation of "
        f"its own, so that it cannot be built for {world_size}; register a family with topologies.register, or name "
        "another topology"
    )

"""Topologies as plain JSON types, and back."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from topologies.phases import Phase
from topologies.placement import Permutation, Product, product
from topologies.registry import build
from topologies.round import Round
from topologies.schedules import Composition, Interleaving, interleave, permuted
from topologies.topology import Topology
from topologies.validation import check_integer


def to_dict(topology: Topology) -> dict[str, Any]:
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
        case Product(machines, local):
            return {"product": [to_dict(machines), to_dict(local)]}
        case Permutation(part, order):
            return {"permuted": to_dict(part), "order": list(order)}
    data: dict[str, Any] = {"name": topology.name, "world_size": topology.world_size}
    if topology.registered:
        return data | {"options": dict(topology.options)}
    if topology.period is None:
        raise ValueError(
            f"topology {topology.name!r} computes its rounds by a function without a period, so JSON cannot hold "
            f"it; register the function as a family with topologies.register, or give it a period"
        )
    data["stochasticity"] = topology.stochasticity
    data["rounds"] = [topology.round(t).to_dict() for t in range(topology.period)]
    return data


def from_dict(data: Mapping[str, Any]) -> Topology:
    """Return the topology that :func:`to_dict` wrote.

    Raises
    ------
    ValueError
        If the keys are not those of a topology, or the family is not registered.
    """
    keys = sorted(data) if isinstance(data, Mapping) else []
    match keys:
        case ["name", "options", "world_size"]:
            return build(data["name"], data["world_size"], **data["options"])
        case ["name", "rounds", "stochasticity", "world_size"]:
            rounds = [Round.from_dict(item) for item in data["rounds"]]
            return Topology.from_rounds(rounds, stochasticity=data["stochasticity"], name=data["name"])
        case ["phases"]:
            return _from_phases(data["phases"])
        case ["interleave"]:
            return interleave(*map(from_dict, data["interleave"]))
        case ["product"]:
            return product(*map(from_dict, data["product"]))
        case ["order", "permuted"]:
            return permuted(from_dict(data["permuted"]), data["order"])
    raise ValueError(
        f"a topology needs the keys name and world_size, and options, or stochasticity and rounds; or those of an "
        f"expression: phases, interleave, product, or permuted and order; got {keys}; pass what "
        f"Topology.to_json() returned"
    )


def _phase_to_dict(phase: Phase) -> dict[str, Any]:
    return {"start": phase.start, "every": phase.every, "topology": to_dict(phase.topology)}


def _from_phases(items: Sequence[Mapping[str, Any]]) -> Topology:
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
    parts = [from_dict(item["topology"]).every(item["every"]) for item in items]
    topology = parts[0]
    for start, part in zip(starts[1:], parts[1:], strict=True):
        topology = topology.then(part, after=start)
    return topology

"""The same topology for another number of ranks."""

from __future__ import annotations

from typing import Any

from topologies.schedule import Schedule, ScheduleT
from topologies.serialization import from_dict, to_dict
from topologies.validation import check_world_size


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

"""One or a few topologies of every family, to show what it does at about a given size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from topologies.building import variants
from topologies.family_registry import family, options_of
from topologies.topology import Topology
from topologies.validation import check_integer

#: Families are asked for sizes up to here.
LARGEST_SAMPLE = 1024

_COMPARED_ROUNDS = 16


def samples(name: str, world_size: int) -> list[Topology]:
    """Return the variants of a family that differ, for n ranks or for the nearest number that it serves.

    Parameters
    ----------
    name
        One of :func:`topologies.available`.
    world_size
        Number of ranks n, 2 to 1024. Of two sizes as near it is the smaller one.

    Raises
    ------
    ValueError
        If the family is unknown, or none of its variants serves any size up to 1024.

    Examples
    --------
    >>> samples("hypercube", 11)
    [Topology('hypercube', world_size=8, period=1)]
    >>> [topology.options["k"] for topology in samples("hyper_hypercube", 16)]  # 2 and 4 are no different
    [1, 3]
    """
    world_size = check_integer("world_size", world_size, minimum=2)
    if world_size > LARGEST_SAMPLE:
        raise ValueError(f"world_size must be at most {LARGEST_SAMPLE}, got {world_size}; choose a smaller one")
    for size in _by_distance(world_size):
        found = distinct(variants(name, size))
        if found:
            return found
    raise ValueError(
        f"no variant of family {name!r} serves any world_size from 2 to {LARGEST_SAMPLE}; name options that do: "
        f"@register({name!r}, variants=lambda world_size, local_size: [{{'option': 'value'}}])"
    )


def sample_text(sample: Topology, world_size: int) -> str:
    """Return what is shown of a family for about ``world_size`` ranks: the sample's ranks and its options."""
    shown = ", ".join(filter(None, (f"{sample.world_size} ranks", options_text(sample.options))))
    nearest = f" (the nearest number to {world_size} that it serves)" if sample.world_size != world_size else ""
    return shown + nearest


def title_of(topology: Topology) -> str:
    """Return the name, and in brackets the options that are not the family's defaults."""
    options = chosen_options(topology)
    return f"{topology.name} ({options})" if options else topology.name


def chosen_options(topology: Topology) -> str:
    """Return the options that are not the family's defaults as text."""
    defaults = options_of(family(topology.name)) if topology.registered else {}
    chosen = {
        name: value
        for name, value in topology.options.items()
        if name not in defaults or value != defaults[name].default
    }
    return options_text(chosen)


def options_text(options: Mapping[str, Any]) -> str:
    """Return ``name=value, ..``; a graph is told by its numbers of nodes and edges, what is unset is left out.

    Examples
    --------
    >>> options_text({"factors": (2, 3), "shape": None, "probability": 1 / 3})
    'factors=(2, 3), probability=0.3333'
    """
    return ", ".join(f"{name}={_value(value)}" for name, value in options.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        if {"nodes", "edges"} <= set(value):
            return f"{len(value['nodes'])} nodes and {len(value['edges'])} edges"
        return "{..}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _by_distance(world_size: int) -> Iterator[int]:
    yield world_size
    for distance in itertools.count(1):
        if distance > max(LARGEST_SAMPLE - world_size, world_size - 2):
            return
        yield from (size for size in (world_size - distance, world_size + distance) if 2 <= size <= LARGEST_SAMPLE)


def distinct(topologies: list[Topology]) -> list[Topology]:
    """Return the topologies whose rounds differ from those of all before them."""
    found: list[Topology] = []
    for topology in topologies:
        if not any(_same_rounds(topology, other) for other in found):
            found.append(topology)
    return found


def _same_rounds(one: Topology, other: Topology) -> bool:
    if one.period != other.period:
        return False
    return all(one.round(t) == other.round(t) for t in range(one.period or _COMPARED_ROUNDS))

"""One or a few topologies of every family, to show what it does at about a given size."""

from topologies.reports.disguises import without_disguises
from topologies.schedule import title
from topologies.topology import Topology, family, options_of, variants
from topologies.validation import check_integer

#: Families are asked for sizes up to here.
LARGEST_SAMPLE = 1024


def samples(name: str, world_size: int) -> list[Topology]:
    """Return the variants of a family that differ, for n ranks (2 to 1024) or for the nearest number that it serves.

    Examples
    --------
    >>> samples("hypercube", 11)
    [Topology('hypercube', world_size=8, period=1)]
    >>> [topology.options["k"] for topology in samples("hyper_hypercube", 16)]  # 2 and 4 are no different
    [1, 3]
    """
    world_size = check_integer("world_size", world_size, minimum=2, maximum=LARGEST_SAMPLE)
    for size in sorted(range(2, LARGEST_SAMPLE + 1), key=lambda size: abs(size - world_size)):
        found = without_disguises(variants(name, size))
        if found:
            return found
    raise ValueError(
        f"no variant of family {name!r} serves any world_size from 2 to {LARGEST_SAMPLE}; name options that do: "
        f"@register({name!r}, variants=lambda world_size, local_size: [{{'option': 'value'}}])"
    )


def title_of(topology: Topology) -> str:
    """Return the name, and in brackets the options that are not the family's defaults."""
    defaults = options_of(family(topology.name)) if topology.registered else {}
    chosen = {
        name: value
        for name, value in topology.options.items()
        if name not in defaults or value != defaults[name].default
    }
    return title(topology.name, chosen)

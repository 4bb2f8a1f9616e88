"""From the name of a family to topologies."""

from __future__ import annotations

import contextlib
from typing import Any

from topologies.family_registry import build_family, choices_of
from topologies.topology import Topology


def build(name: str, world_size: int, **options: Any) -> Topology:
    """Return the topology of a registered family.

    Parameters
    ----------
    name
        One of :func:`available`.
    world_size
        Number of ranks, 1 to 2^31. With one rank every family is a single identity round; its options must exist,
        and are recorded, but their values are not checked. A family that stores its rounds refuses sizes at which
        that would take minutes or gigabytes.
    options
        The family's options.

    Raises
    ------
    ValueError
        If the name is unknown, or the family cannot serve the size or the value of an option.
    TypeError
        If an option is unknown or missing, or of the wrong type.

    Examples
    --------
    >>> build("hyper_cuboid", 6, factors=(2, 3)).round(0).groups
    ((0, 1), (2, 3), (4, 5))
    """
    return build_family(Topology, name, world_size, **options)


def variants(name: str, world_size: int, *, local_size: int = 1) -> list[Topology]:
    """Return the topologies of a family that are worth comparing for n ranks; none if it cannot serve n.

    Parameters
    ----------
    name
        One of :func:`available`.
    world_size
        Number of ranks n.
    local_size
        Ranks per node; a family of nodes takes it as an option where it divides n.

    Examples
    --------
    >>> variants("hypercube", 8), variants("hypercube", 9)
    ([Topology('hypercube', world_size=8, period=1)], [])
    """
    built = []
    for options in choices_of(name, world_size, local_size):
        with contextlib.suppress(ValueError):  # the family's own refusal of this size
            built.append(build(name, world_size, **options))
    return built

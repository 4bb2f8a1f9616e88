"""A topology: a schedule of rounds with everything that can be asked of it and made of it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

from topologies import compositions, serialization
from topologies.analysis import description
from topologies.analysis.exactness import known_exact_after
from topologies.family_registry import build_family, choices_of
from topologies.graphs.graph_files import GraphSource, read_graph
from topologies.schedule import Schedule


class Topology(Schedule):
    """A schedule of rounds for ``world_size`` ranks; round t follows from t alone, on every rank alike.

    Use :func:`topologies.build` for a registered family, or :meth:`from_graph`, :meth:`Schedule.from_rounds` and
    :meth:`Schedule.from_function` for one of your own. The constructor, see :class:`Schedule`, is for families.

    Examples
    --------
    >>> ring = topologies.build("ring", 8)
    >>> ring.round(3).neighbours(0)
    {1: 0.3333333333333333, 7: 0.3333333333333333}
    """

    every = compositions.every
    then = compositions.then
    interleave = compositions.interleave
    averaged_every = compositions.averaged_every
    permuted = compositions.permuted
    product = compositions.product
    resized = serialization.resized
    describe = description.describe

    @classmethod
    def from_graph(cls, graph: GraphSource, weights: str = "metropolis") -> Topology:
        """Return the topology that exchanges along a graph in every round.

        The graph is a networkx graph, node-link data or a file. The same as ``build("graph", n, graph=graph,
        weights=weights)`` for a graph of n nodes, see ``topologies.families.given_graph.graph``.
        """
        graph = read_graph(graph)
        return build_family(cls, "graph", len(graph), graph=graph, weights=weights)

    @property
    def exact_after(self) -> int | None:
        """After how many rounds from a period boundary all ranks hold exactly the mean; ``None``: never.

        Promised by the family, or else measured for a schedule with a period, see ``topologies.analysis``.
        """
        return known_exact_after(self)

    def to_json(self) -> str:
        """Return the topology as JSON: name, size and options of a registered one, the phases of a composed one.

        Any other is written as its rounds; a schedule from a function without a period is refused, for it has no end.
        """
        return json.dumps(serialization.to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Return the topology that :meth:`to_json` wrote; its family must be registered."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"text is not JSON ({error}); pass what Topology.to_json() returned") from None
        return serialization.from_dict(cls, data)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle a registered topology by name and options, any other one by its rounds or its phases."""
        if not self.registered:
            return super().__reduce__()
        return functools.partial(build_family, type(self), self.name, self.world_size, **self.options), ()


def build(name: str, world_size: int, **options: Any) -> Topology:
    """Return the topology of a registered family.

    Parameters
    ----------
    world_size
        Number of ranks, 1 to 2^31. With one rank every family is a single identity round; its options must exist,
        and are recorded, but their values are not checked. A family that stores its rounds refuses sizes at which
        that would take minutes or gigabytes.

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

    A family of nodes takes ``local_size``, the ranks per node, as an option where it divides n.

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

"""A topology: a schedule of rounds with everything that can be asked of it and made of it.

And topologies as plain JSON types, and back, for as many ranks or for others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Self

from topologies import compositions
from topologies.analysis import description
from topologies.analysis.exactness import known_exact_after
from topologies.family_registry import build_family, choices_of
from topologies.graphs.graph_files import GraphSource, read_graph
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

    def resized(self, world_size: int) -> Self:
        """Return the same topology for another number of ranks: each family that it is made of, with its options.

        What was made for its own ranks, by rounds, as a product or permuted, is refused.

        Examples
        --------
        >>> topologies.build("one_peer_exponential", 8).every(2).resized(5).name
        'one_peer_exponential.every(2)'
        """
        world_size = check_world_size(world_size)
        if world_size == self.world_size:
            return self

        def resize(data: Any) -> Any:
            match data:
                case {"options": _}:
                    return data | {"world_size": world_size}
                case {"rounds": _} | {"product": _} | {"permuted": _}:
                    raise ValueError(
                        f"topology {self.name!r} was made for {self.world_size} ranks by rounds, a product or a "
                        f"permutation of its own, so that it cannot be built for {world_size}; register a family with "
                        f"topologies.register, or name another topology"
                    )
                case dict():
                    return {key: resize(value) for key, value in data.items()}
                case list():
                    return [resize(value) for value in data]
            return data

        return from_dict(type(self), resize(to_dict(self)))

    def to_json(self) -> str:
        """Return the topology as JSON: name, size and options of a registered one, the phases of a composed one.

        Any other is written as its rounds; a schedule from a function without a period is refused, for it has no end.
        """
        return json.dumps(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Return the topology that :meth:`to_json` wrote; its family must be registered."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"text is not JSON ({error}); pass what Topology.to_json() returned") from None
        return from_dict(cls, data)

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

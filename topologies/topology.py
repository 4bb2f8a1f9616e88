"""A topology: a schedule of rounds with everything that can be asked of it and made of it.

And the families by name, how one is built, and topologies as plain JSON types, and back, for as many ranks or others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

import networkx as nx

from topologies import compositions
from topologies.analysis import description
from topologies.analysis.exactness import known_exact_after
from topologies.graphs.graph_files import GraphSource, read_graph
from topologies.registry import Registry, nearest_match
from topologies.round import Round
from topologies.schedule import Composition, Schedule, ScheduleT, plain_data
from topologies.validation import check_world_size

Family = Callable[..., Schedule]

#: The family with which ranks gossip unless another one is chosen.
DEFAULT = "one_peer_exponential"

#: ``(world_size, local_size) -> options``: what is worth trying of a family for n ranks on nodes of ``local_size``.
Variants = Callable[[int, int], Iterable[Mapping[str, Any]]]
_FamilyT = TypeVar("_FamilyT", bound=Family)

FAMILIES: Registry[Family] = Registry("topology")

_VARIANTS: dict[Family, Variants] = {}
#: What to do about data that are not those of a topology.
_WRITTEN = "pass what Topology.to_json() returned"


def register(name: str, *, variants: Variants | None = None) -> Callable[[_FamilyT], _FamilyT]:
    """Return a decorator that makes a family available to :func:`topologies.build`.

    The family is a function ``(world_size, *, option=...) -> Topology`` for ``world_size >= 2``; a single rank
    is served for it. It refuses a size or an option that it cannot serve with a ValueError that says what it
    can. Name and options of the result are filled in.

    Parameters
    ----------
    name
        What :func:`topologies.build` knows it by.
    variants
        ``(world_size, local_size) -> [options, ..]``: the options that comparisons of all families try, for
        ``world_size >= 2`` ranks on nodes of ``local_size`` (1: each rank is alone). By default the family's own
        defaults; none if an option has no default.

    Examples
    --------
    >>> @register("pairs")
    ... def pairs(world_size: int) -> topologies.Topology:
    ...     couples = [(rank, rank + 1) for rank in range(0, world_size - 1, 2)]
    ...     return topologies.Topology.from_rounds([Round.from_groups(world_size, couples)])
    >>> topologies.build("pairs", 4)
    Topology('pairs', world_size=4, period=1)
    """

    def decorate(function: _FamilyT) -> _FamilyT:
        if any(option.kind is not option.KEYWORD_ONLY for option in options_of(function).values()):
            raise TypeError(
                f"the options of family {name!r} must be keyword-only; put a * after world_size in its signature"
            )
        FAMILIES.register(name)(function)
        if variants is not None:
            _VARIANTS[function] = variants
        return function

    return decorate


def available() -> tuple[str, ...]:
    """Return the names of all families, sorted."""
    return FAMILIES.available()


def family(name: str) -> Family:
    """Return the function registered as ``name``; its docstring and signature describe the family."""
    return FAMILIES.get(name)


def options_of(function: Family) -> dict[str, inspect.Parameter]:
    """Return the options of a family by their names, in the order of its signature."""
    _, *options = inspect.signature(function).parameters.values()
    return {option.name: option for option in options}


def choices_of(name: str, world_size: int, local_size: int) -> list[Mapping[str, Any]]:
    """Return the options that comparisons of all families try of one, see :func:`register`."""
    function = family(name)
    if function in _VARIANTS:
        return list(_VARIANTS[function](world_size, local_size)) if world_size > 1 else []
    return [] if any(option.default is option.empty for option in options_of(function).values()) else [{}]


def build_family(kind: type[ScheduleT], name: str, world_size: int, /, **options: Any) -> ScheduleT:
    """Return the schedule of a registered family, of the class ``kind``; see :func:`topologies.build`."""
    function = family(name)
    world_size = check_world_size(world_size)
    filled = plain_data(_fill_in_defaults(name, function, options))
    schedule = function(world_size, **filled) if world_size > 1 else kind.from_rounds([Round.identity(1)])
    if not isinstance(schedule, kind):
        raise TypeError(
            f"family {name!r} must return a {kind.__name__}, got {schedule!r} ({type(schedule).__name__}); return one "
            f"of {kind.__name__}.from_rounds or from_function"
        )
    recorded = filled | dict(schedule.options)
    for option, value in recorded.items():
        if isinstance(value, nx.Graph):
            recorded[option] = nx.node_link_data(value, edges="edges")
    return replace(schedule, name=name, options=recorded, registered=True)


def _fill_in_defaults(name: str, function: Family, options: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: option.default for name, option in options_of(function).items()}
    listed = f"its options are: {', '.join(known)}" if known else "it has no options"
    for option in options:
        if option not in known:
            nearest = nearest_match(option, known)
            hint = f" (did you mean {nearest!r}?)" if nearest else ""
            raise TypeError(f"topology {name!r} has no option {option!r}{hint}; {listed}")
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in options:
            raise TypeError(f"topology {name!r} needs the option {option!r}; {listed}")
    return {option: options.get(option, default) for option, default in known.items()}


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

        What was permuted is in the order of its ranks again. What was made for its own ranks, by rounds or as a
        product, is refused.

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
                case {"permuted": part}:
                    return resize(part)
                case {"rounds": _} | {"product": _}:
                    raise ValueError(
                        f"topology {self.name!r} was made for {self.world_size} ranks by rounds or as a product, so "
                        f"that it cannot be built for {world_size}; register a family with topologies.register, or "
                        f"name another topology"
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

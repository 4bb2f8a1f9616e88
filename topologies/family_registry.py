"""The families by name, and how one is built."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import networkx as nx

from topologies.registry import Registry, nearest_match
from topologies.round import Round
from topologies.schedule import Schedule, ScheduleT, plain_data
from topologies.validation import check_world_size

Family = Callable[..., Schedule]

#: The family with which ranks gossip unless another one is chosen.
DEFAULT = "one_peer_exponential"

#: ``(world_size, local_size) -> options``: what is worth trying of a family for n ranks on nodes of ``local_size``.
Variants = Callable[[int, int], Iterable[Mapping[str, Any]]]
_FamilyT = TypeVar("_FamilyT", bound=Family)

FAMILIES: Registry[Family] = Registry("topology")

_VARIANTS: dict[Family, Variants] = {}


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

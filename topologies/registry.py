"""The families by name."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import networkx as nx
import numpy as np

from topologies.round import Round
from topologies.topology import Topology
from topologies.validation import check_world_size

Family = Callable[..., Topology]

#: ``(world_size, local_size) -> options``: what is worth trying of a family for n ranks on nodes of ``local_size``.
Variants = Callable[[int, int], Iterable[Mapping[str, Any]]]
_FamilyT = TypeVar("_FamilyT", bound=Family)


class _Entry(NamedTuple):
    function: Family
    variants: Variants | None


_FAMILIES: dict[str, _Entry] = {}


def register(name: str, *, variants: Variants | None = None) -> Callable[[_FamilyT], _FamilyT]:
    """Return a decorator that makes a family available to :func:`build`.

    The family is a function ``(world_size, *, option=...) -> Topology`` for ``world_size >= 2``; a single rank
    is served for it. It refuses a size or an option that it cannot serve with a ValueError that says what it
    can. Name and options of the result are filled in.

    Parameters
    ----------
    name
        What :func:`build` knows it by.
    variants
        ``(world_size, local_size) -> [options, ..]``: the options that comparisons of all families try, for
        ``world_size >= 2`` ranks on nodes of ``local_size`` (1: each rank is alone). By default the family's own
        defaults; none if an option has no default.

    Raises
    ------
    ValueError
        If the name is taken.
    TypeError
        If the options are not keyword-only.

    Examples
    --------
    >>> @register("pairs")
    ... def pairs(world_size: int) -> Topology:
    ...     couples = [(rank, rank + 1) for rank in range(0, world_size - 1, 2)]
    ...     return Topology.from_rounds([Round.from_groups(world_size, couples)])
    >>> build("pairs", 4)
    Topology('pairs', world_size=4, period=1)
    """

    def decorate(function: _FamilyT) -> _FamilyT:
        if name in _FAMILIES:
            taken = _FAMILIES[name].function
            raise ValueError(
                f"the topology name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; choose another name"
            )
        _, *options = inspect.signature(function).parameters.values()
        if any(option.kind is not inspect.Parameter.KEYWORD_ONLY for option in options):
            raise TypeError(
                f"the options of family {name!r} must be keyword-only; put a * after world_size in its signature"
            )
        _FAMILIES[name] = _Entry(function, variants)
        return function

    return decorate


def available() -> tuple[str, ...]:
    """Return the names of all families, sorted."""
    return tuple(sorted(_FAMILIES))


def family(name: str) -> Family:
    """Return the function registered as ``name``; its docstring and signature describe the family.

    Raises
    ------
    ValueError
        If there is none; the error lists what exists and the nearest match.
    TypeError
        If the name is no text.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"the name of a topology must be a str, got {name!r} ({type(name).__name__}); pass one of "
            f"{', '.join(available())}"
        )
    if name in _FAMILIES:
        return _FAMILIES[name].function
    nearest = difflib.get_close_matches(name, available(), n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown topology {name!r}.{hint} Available: {', '.join(available())}")


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
    function = family(name)
    given = _FAMILIES[name].variants
    if given is not None:
        choices = list(given(world_size, local_size)) if world_size > 1 else []
    else:
        _, *parameters = inspect.signature(function).parameters.values()
        choices = [] if any(parameter.default is parameter.empty for parameter in parameters) else [{}]
    built = []
    for options in choices:
        with contextlib.suppress(ValueError):  # the family's own refusal of this size
            built.append(build(name, world_size, **options))
    return built


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
    function = family(name)
    world_size = check_world_size(world_size)
    filled = _as_plain_data(_fill_in_defaults(name, function, options))
    topology = function(world_size, **filled) if world_size > 1 else Topology.from_rounds([Round.identity(1)])
    recorded = filled | dict(topology.options)
    for option, value in recorded.items():
        if isinstance(value, nx.Graph):
            recorded[option] = nx.node_link_data(value, edges="edges")
    return replace(topology, name=name, options=_as_plain_data(recorded), registered=True)


def _fill_in_defaults(name: str, function: Family, options: Mapping[str, Any]) -> dict[str, Any]:
    _, *parameters = inspect.signature(function).parameters.values()
    known = {parameter.name: parameter.default for parameter in parameters}
    listed = f"its options are: {', '.join(known)}" if known else "it has no options"
    for option in options:
        if option not in known:
            nearest = difflib.get_close_matches(option, known, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise TypeError(f"topology {name!r} has no option {option!r}{hint}; {listed}")
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in options:
            raise TypeError(f"topology {name!r} needs the option {option!r}; {listed}")
    return {option: options.get(option, default) for option, default in known.items()}


def _as_plain_data(value: Any) -> Any:
    """Return an option as data that JSON can hold, with tuples for sequences; what is none stays as it is."""
    if isinstance(value, Mapping):
        return {str(key): _as_plain_data(item) for key, item in value.items()}
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return value.item()
    if isinstance(value, np.ndarray) or (isinstance(value, Sequence) and not isinstance(value, str | bytes)):
        return tuple(_as_plain_data(item) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value

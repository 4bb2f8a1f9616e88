"""What an optimizer computes the update of a value from: the value's own gradients, its parameter's, or all."""

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.errors import reason, warn_user
from gossip.optimizers.bucket_optimizer import (
    NOT_COUNTED,
    OptimizerArgument,
    build_optimizers,
    requires_closure,
    step_of,
    view_of,
)
from gossip.parameters.names import named_parameters

COUNTER = "step"
IMPLEMENTATION = {"capturable": False, "fused": None, "foreach": None}
"""The constants of a group that choose an implementation; the default implementation runs anywhere."""


class Scope(IntEnum):
    """What an optimizer must be given as it is."""

    ELEMENT, PARAMETER, REPLICA = range(3)


def scope_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None) -> Scope:
    """Find out, with two small matrices in the place of its parameters, what an optimizer must be given as it is.

    An optimizer of elements updates a stack of both, and each element by itself, as it updates the two; one of
    parameters updates each as if it were alone. Of several ``groups``, by default all, it is what the most demanding
    one needs. Whatever its steps raise is raised.
    """
    if requires_closure(optimizer):
        return Scope.REPLICA
    chosen = optimizer.param_groups if groups is None else groups
    return max((_scope_in(optimizer, group) for group in chosen), default=Scope.ELEMENT)


def _scope_in(optimizer: Optimizer, group: dict[str, Any]) -> Scope:
    apart = _values_of(_probe(optimizer, group, [0, 1]))
    try:
        stacked, elements = (_values_of(_probe(optimizer, group, places)) for places in ([...], _ELEMENTS))
    except Exception:  # it takes no such parameter
        stacked = elements = torch.full_like(apart, torch.nan)
    if torch.allclose(apart, stacked) and torch.allclose(apart, elements):
        return Scope.ELEMENT
    alone = torch.cat([_values_of(_probe(optimizer, group, [place])) for place in (0, 1)])
    return Scope.PARAMETER if torch.allclose(apart, alone) else Scope.REPLICA


def kept_for_several(optimizer: Optimizer) -> str:
    """Return in words what an optimizer keeps that is not one value for each element, but for the counter of steps.

    Empty if there is nothing else.
    """
    for group in optimizer.param_groups:
        probe = _probe(optimizer, group, [0])
        (after,) = probe.param_groups
        before = {**vars(optimizer), **group}
        constants = {**vars(probe), **after}.items()
        given = {*NOT_COUNTED, *IMPLEMENTATION, "params", "lr"}
        numbers = ((key, value) for key, value in constants if isinstance(value, int | float) and key not in given)
        counted = [key for key, value in numbers if value != before.get(key)]
        state = probe.state[after["params"][0]].items()
        for key in (*counted, *(key for key, value in state if key != COUNTER and not has_shape(value, _VALUES[0]))):
            return f"it keeps {key!r}, which is not one value for each element of a parameter"
    return ""


def names_needed_whole(optimizer: OptimizerArgument, module: nn.Module) -> frozenset[str]:
    """Return the parameters of which an optimizer needs the whole, by a factory that is called for this alone.

    Raises what :func:`gossip.optimizers.bucket_optimizer.build_optimizers` does.
    """
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        return frozenset()
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    optimizers = build_optimizers(optimizer, module, in_backward=False, by_bucket=False)
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    whole = [group for each, group in groups if known_scope_of(each, Scope.PARAMETER, [group]) is Scope.PARAMETER]
    return frozenset(names[id(held)] for group in whole for held in group["params"])


def known_scope_of(optimizer: Optimizer, otherwise: Scope, groups: Sequence[dict[str, Any]] | None = None) -> Scope:
    """Return the scope, or another one with a warning if it cannot be found out, as steps need a GPU, for instance."""
    try:
        return scope_of(optimizer, groups)
    except Exception as error:
        warn_user(
            f"{type(optimizer).__name__} could not be tried out on small matrices ({reason(error)}): it is taken to "
            f"compute each update from {'single elements' if otherwise is Scope.ELEMENT else 'whole parameters'}"
        )
        return otherwise


_VALUES, *_GRADIENTS = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
_ELEMENTS = [(n, slice(i, i + 1), slice(j, j + 1)) for n, i, j in itertools.product(range(2), range(3), range(3))]


def _values_of(probe: Any) -> torch.Tensor:
    """Return what the probe has made of both matrices, or of one, in their order."""
    return torch.cat([parameter.detach().flatten() for parameter in probe.param_groups[0]["params"]])


def _probe(optimizer: Optimizer, group: dict[str, Any], places: Sequence[Any]) -> Any:
    """Return an optimizer of the same class, constants and counters that has made steps over parts of the matrices."""
    probe, parameters = view_of(optimizer), [nn.Parameter(_VALUES[place].clone()) for place in places]
    constants = group | {key: value for key, value in IMPLEMENTATION.items() if key in group}
    if "lr" in group:
        constants["lr"] = 0.1  # a schedule may start at 0, where nothing would change
    probe.param_groups = [constants | {"params": parameters}]
    probe.state = defaultdict(dict)
    held = (optimizer.state[each] for each in group["params"] if each.numel() and each in optimizer.state)
    known: dict[str, Any] = next(held, {})
    elementwise = elementwise_keys(optimizer.state.items())
    for key, value in known.items():
        for parameter in parameters:
            if key in elementwise:
                probe.state[parameter][key] = torch.full_like(parameter.detach(), float(value.flatten()[0]))
            else:
                probe.state[parameter][key] = copy.deepcopy(value)
    for gradient in _GRADIENTS:
        for parameter, place in zip(parameters, places, strict=True):
            parameter.grad = gradient[place].clone()
        step_of(optimizer)(probe)
    return probe


def has_shape(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether an entry of an optimizer's state has one value per element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def elementwise_keys(entries: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> set[str]:
    """Return the keys of an optimizer's state, given by parameter, with one value per element of the parameter.

    Parameters without dimensions are no evidence, because counters have none either.
    """
    entries = list(entries)
    entries = [(parameter, entry) for parameter, entry in entries if parameter.dim()] or entries
    return {key for parameter, entry in entries for key, value in entry.items() if has_rows(key, value, parameter)}


def has_rows(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return the same, but not of a counter of steps, which has the shape of a parameter without dimensions."""
    return key != COUNTER and has_shape(value, parameter)

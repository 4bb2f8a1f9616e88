"""What an optimizer computes the update of a value from: the value's own gradients, its parameter's, or all."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.optimizers.bucket_optimizer import OptimizerArgument, build_optimizers, step_of, view_of
from gossip.optimizers.closures import requires_closure
from gossip.parameters.names import named_parameters

COUNTER = "step"
IMPLEMENTATION = {"capturable": False, "fused": None, "foreach": None}
"""The constants of a group that choose an implementation; the default implementation runs anywhere."""


class Scope(IntEnum):
    """What an optimizer must be given as it is."""

    ELEMENT, PARAMETER, REPLICA = range(3)


def scope_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None) -> Scope:
    """Find out, with two small matrices in the place of its parameters, what an optimizer must be given as it is.

    An optimizer of elements updates a stack of two as both; one of parameters updates each as if it were alone. Of
    several ``groups``, by default all, it is what the most demanding one needs. Whatever its steps raise is raised.
    """
    if requires_closure(optimizer):
        return Scope.REPLICA
    chosen = optimizer.param_groups if groups is None else groups
    return max((_scope_in(optimizer, group) for group in chosen), default=Scope.ELEMENT)


def _scope_in(optimizer: Optimizer, group: dict[str, Any]) -> Scope:
    apart, _ = _probe(optimizer, group, [0, 1])
    try:
        together, _ = _probe(optimizer, group, [slice(None)])
    except Exception:  # it takes no such stack
        together = [torch.full_like(_VALUES, torch.nan)]
    if torch.allclose(torch.stack(apart), together[0]):
        return Scope.ELEMENT
    alone = [_probe(optimizer, group, [place])[0][0] for place in (0, 1)]
    return Scope.PARAMETER if torch.allclose(torch.stack(apart), torch.stack(alone)) else Scope.REPLICA


def state_of_other_shapes(optimizer: Optimizer) -> str:
    """Return in words what an optimizer keeps of a parameter that has another shape; empty if there is nothing."""
    for group in optimizer.param_groups:
        _, state = _probe(optimizer, group, [0])
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and not has_shape(value, _VALUES[0]):
                return f"{key!r} has the shape {list(value.shape)} for a parameter of {list(_VALUES[0].shape)}"
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
    whole = [group for each, group in groups if known_scope_of(each, [group]) is Scope.PARAMETER]
    return frozenset(names[id(held)] for group in whole for held in group["params"])


def known_scope_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None) -> Scope:
    """Return the scope, which is that of elements where it cannot be found out: steps that need a GPU, for instance."""
    try:
        return scope_of(optimizer, groups)
    except Exception:
        return Scope.ELEMENT


_VALUES, *_GRADIENTS = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


def _probe(
    optimizer: Optimizer, group: dict[str, Any], places: Sequence[int | slice]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return parameters after steps of an optimizer with the same class, constants and counters, and the first's state.

    Each parameter is that one of the two matrices, or the stack of both.
    """
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
    return [parameter.detach() for parameter in parameters], probe.state[parameters[0]]


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

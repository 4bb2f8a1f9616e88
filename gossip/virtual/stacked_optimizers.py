"""The user's optimizers over the stacked parameters, and rows that a step leaves unchanged."""

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.optimizers.bucket_optimizer import (
    OptimizerArgument,
    build_optimizers,
    check_parameters_held,
    fire_step_hooks,
    step_of,
    view_of,
)
from gossip.private_torch import note_step_called

Stacks = Mapping[int, Sequence[nn.Parameter]]
"""The stacks of each of the module's parameters, by the parameter's id: one per device."""
COUNTER = "step"
_STEPS_BY_ROW = "_gossip_steps_by_row"
"""The attribute of optimizers that need a parameter as it is, not stacked: they step over one row after the other."""
IMPLEMENTATION = {"capturable": False, "fused": None, "foreach": None}
"""The constants of a group that choose an implementation; the default implementation runs anywhere."""


def build_stacked_optimizers(optimizer: OptimizerArgument, module: nn.Module, stacks: Stacks) -> tuple[Optimizer, ...]:
    """Return the given optimizers, or the factory's, with stacks in place of ``module``'s parameters.

    They are made over the module's own parameters, so a factory that inspects names and shapes works as usual.

    Raises TypeError, ValueError: as for :func:`gossip.optimizers.bucket_optimizer.build_optimizers`; or an optimizer
    does not update each parameter by itself.
    """
    optimizers = build_optimizers(optimizer, module, in_backward=True, by_bucket=True)
    for optimizer in optimizers:
        if not _is_elementwise(optimizer):
            setattr(optimizer, _STEPS_BY_ROW, True)
        stack_groups(optimizer, stacks)
    return optimizers


def stack_groups(optimizer: Optimizer, stacks: Stacks) -> None:
    """Put stacks in place of the module's parameters wherever these occur in the optimizer."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False
            logger.warning(
                "{}: fused=True runs as fused=False, because fused kernels do not support stacks with gaps in memory",
                type(optimizer).__name__,
            )
        found = [stacks.get(id(parameter), (parameter,)) for parameter in group["params"]]
        if "param_names" in group:
            names = zip(group["param_names"], found, strict=True)
            group["param_names"] = [name for name, by_shard in names for _ in by_shard]
        group["params"] = [stack for by_shard in found for stack in by_shard]
    elementwise = elementwise_keys(optimizer.state.items())
    for parameter in [held for held in optimizer.state if id(held) in stacks]:
        entry = optimizer.state.pop(parameter)
        for stack in stacks[id(parameter)]:
            optimizer.state[stack] = {
                key: value.to(stack.device).expand(stack.shape).clone()
                if key in elementwise
                else copy.deepcopy(value)  # a counter that is a tensor is incremented in place
                for key, value in entry.items()
            }


def step_all(optimizers: Sequence[Optimizer]) -> None:
    """Let the optimizers make their own steps, which schedulers notice; ``optimizer.step()`` is the user's."""
    for optimizer in optimizers:
        note_step_called(optimizer)
        if not hasattr(optimizer, _STEPS_BY_ROW):
            type(optimizer).step(optimizer)
            continue
        _step_by_row(optimizer)
        fire_step_hooks(optimizer)


def _step_by_row(optimizer: Optimizer) -> None:
    """Step over each row of a stack as over a parameter of its own, whose state is the row of the stack's."""
    view, step = view_of(optimizer), step_of(optimizer)
    for group in optimizer.param_groups:
        for stack in group["params"]:
            if stack.grad is None:
                continue
            entry, after = optimizer.state[stack], []
            for number, (values, gradient) in enumerate(zip(stack.detach(), stack.grad, strict=True)):
                row = nn.Parameter(values)
                row.grad = gradient
                own = {
                    key: value[number] if _has_rows(key, value, stack) else copy.deepcopy(value)
                    for key, value in entry.items()
                }
                view.param_groups, view.state = [{**group, "params": [row]}], defaultdict(dict, {row: own})
                step(view)
                after.append((row, view.state[row]))
            for key in after[0][1]:
                rows = [state[key] for _, state in after]
                entry[key] = torch.stack(rows) if _has_rows(key, rows[0], after[0][0]) else rows[0]


def step_counters(optimizers: Sequence[Optimizer], parameters: Iterable[nn.Parameter]) -> Iterator[dict[str, Any]]:
    """Yield the entries in the optimizers' states that count the steps of these parameters.

    Raises ValueError: an optimizer keeps something else that all replicas share.
    """
    for optimizer, parameter in itertools.product(optimizers, parameters):
        entry = optimizer.state.get(parameter, {})
        for key in [key for key, value in entry.items() if not has_shape(value, parameter)]:
            if key != COUNTER:
                raise ValueError(
                    f"replay: {type(optimizer).__name__} keeps {key!r}, which all replicas share, whereas each makes "
                    "its own steps; choose SGD, Adam or AdamW"
                )
            yield entry


def check_stacks_held(optimizers: Sequence[Optimizer], stacks: Stacks) -> None:
    """Refuse, by ValueError, a parameter that does not belong to the module, or that is held twice."""
    known = [stack for by_shard in stacks.values() for stack in by_shard]
    check_parameters_held(optimizers, {str(number): stack for number, stack in enumerate(known)})
    held = [
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    if len(set(held)) < len(held):
        raise ValueError(
            "a parameter was added to an optimizer that already holds it, and would be updated twice; add only "
            "parameters that no group holds"
        )


def has_shape(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether an entry of an optimizer's state has one value per element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def elementwise_keys(entries: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> set[str]:
    """Return the keys of an optimizer's state, given by parameter, with one value per element of the parameter.

    Parameters without dimensions are no evidence, because counters have none either.
    """
    entries = list(entries)
    entries = [(parameter, entry) for parameter, entry in entries if parameter.dim()] or entries
    return {key for parameter, entry in entries for key, value in entry.items() if _has_rows(key, value, parameter)}


def _has_rows(key: str, value: Any, parameter: torch.Tensor) -> bool:
    return key != COUNTER and has_shape(value, parameter)


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates stacked replicas as it does separate ones, checked on two small matrices.

    Raises ValueError: it does not, and not if it steps over one row of the stack after the other either.
    """
    source = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 2, 3, 3, generator=source, dtype=torch.float64).unbind()
    is_elementwise = True
    for group in optimizer.param_groups:
        try:
            apart = _probe(optimizer, group, list(values), [gradient.unbind() for gradient in gradients])
            stacked = [values], [[gradient] for gradient in gradients]
            try:
                together = _probe(optimizer, group, *stacked)
            except Exception:
                together = [torch.full_like(values, torch.nan)]
            if not torch.allclose(torch.stack(apart), together[0]):
                is_elementwise = False
                together = _probe(optimizer, group, *stacked, step=_step_by_row)
        except Exception as error:
            raise ValueError(f"{_refusal(optimizer)} ({' '.join(str(error).split())})") from error
        if not torch.allclose(torch.stack(apart), together[0]):
            raise ValueError(_refusal(optimizer))
    return is_elementwise


def _refusal(optimizer: Optimizer) -> str:
    return (
        f"optimizer {type(optimizer).__name__} does not update each parameter by itself, or keeps of it what has "
        "another shape, so stacked replicas would affect each other; choose one that does, such as SGD, AdamW or Muon, "
        "or train in processes (GossipDataParallel)"
    )


def _probe(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    step: Callable[[Any], object] | None = None,
) -> list[torch.Tensor]:
    """Return ``values`` after steps of an optimizer with the same class, constants and counters.

    ValueError if it keeps a tensor of another shape than a parameter's.
    """
    probe, parameters = view_of(optimizer), [nn.Parameter(each.clone()) for each in values]
    constants = group | {key: value for key, value in IMPLEMENTATION.items() if key in group}
    if "lr" in group:
        constants["lr"] = 0.1  # a schedule may start at 0, where nothing would change
    probe.param_groups = [constants | {"params": parameters}]
    probe.state = defaultdict(dict)
    known: dict[str, Any] = next(
        (
            optimizer.state[parameter]
            for parameter in group["params"]
            if parameter.numel() and parameter in optimizer.state
        ),
        {},
    )
    elementwise = elementwise_keys(optimizer.state.items())
    for key, value in known.items():
        for parameter in parameters:
            if key in elementwise:
                probe.state[parameter][key] = torch.full_like(parameter.detach(), float(value.flatten()[0]))
            else:
                probe.state[parameter][key] = copy.deepcopy(value)
    for of_replica in gradients:
        for parameter, gradient in zip(parameters, of_replica, strict=True):
            parameter.grad = gradient.clone()
        (step or step_of(optimizer))(probe)
    for key, value in probe.state[parameters[0]].items() if step is not None else ():
        if isinstance(value, torch.Tensor) and value.dim() and not has_shape(value, parameters[0]):
            raise ValueError(f"its state has {key!r}, {list(value.shape)}, for a parameter {list(values[0].shape[1:])}")
    return [parameter.detach() for parameter in parameters]


@contextlib.contextmanager
@torch.no_grad()
def left_alone(optimizers: Sequence[Optimizer], rows: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Leave these rows of parameters, [k], bool, and of the optimizers' state, unchanged by steps within the block.

    Their gradients are set to zero.
    """
    saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for parameter, which in rows.items():
        states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
        values = [value for state in states for value in state.values() if has_shape(value, parameter)]
        saved += [(value, which, value[which]) for value in (parameter.detach(), *values)]
        parameter[which] = 0  # so that new state is zero too, even with weight decay
        if parameter.grad is not None:
            parameter.grad[which] = 0
    try:
        yield
    finally:
        for value, which, before in saved:
            value[which] = before

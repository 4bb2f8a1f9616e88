"""The user's optimizers over the stacked parameters, and rows that a step leaves unchanged."""

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.optimizers.bucket_optimizer import (
    OptimizerArgument,
    build_optimizers,
    check_parameters_held,
    held_by,
    step_of,
    view_of,
)
from gossip.optimizers.scopes import COUNTER, Scope, elementwise_keys, has_rows, has_shape, kept_for_several, scope_of
from gossip.private_torch import note_step_called

Stacks = Mapping[int, Sequence[nn.Parameter]]
"""The stacks of each of the module's parameters, by the parameter's id: one per device."""
_STEPS_BY_ROW = "_gossip_steps_by_row"
"""The attribute of optimizers that need a parameter as it is, not stacked: they step over one row after the other."""


def build_stacked_optimizers(optimizer: OptimizerArgument, module: nn.Module, stacks: Stacks) -> tuple[Optimizer, ...]:
    """Return the given optimizers, or the factory's, with stacks in place of ``module``'s parameters.

    They are made over the module's own parameters, so a factory that inspects names and shapes works as usual.

    Raises TypeError, ValueError: as for :func:`gossip.optimizers.bucket_optimizer.build_optimizers`; or an optimizer
    does not update each parameter by itself.
    """
    optimizers = build_optimizers(optimizer, module, in_backward=True, by_bucket=True)
    for optimizer in optimizers:
        _note_scope(optimizer)
        stack_groups(optimizer, stacks)
    return optimizers


def _note_scope(optimizer: Optimizer) -> None:
    """Let an optimizer step by rows if it needs them as they are; ValueError if replicas cannot be stacked for it."""
    try:
        scope = scope_of(optimizer)
        other = "it looks at several parameters at once" * (scope is Scope.REPLICA)
        if scope is Scope.PARAMETER:
            setattr(optimizer, _STEPS_BY_ROW, True)
            other = kept_for_several(optimizer)
    except Exception as error:
        other = " ".join(str(error).split())
    if other:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} cannot update replicas that are stacked: {other}; choose another "
            "one, such as SGD, AdamW or Muon, or train in processes (GossipDataParallel)"
        )


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
        if hasattr(optimizer, _STEPS_BY_ROW):
            _step_by_row(optimizer)
        else:
            type(optimizer).step(optimizer)


@Optimizer.profile_hook_step
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
                    key: value[number] if has_rows(key, value, stack) else copy.deepcopy(value)
                    for key, value in entry.items()
                }
                view.param_groups, view.state = [{**group, "params": [row]}], defaultdict(dict, {row: own})
                step(view)
                after.append((row, view.state[row]))
            for key in after[0][1]:
                rows = [state[key] for _, state in after]
                if not has_rows(key, rows[0], after[0][0]):
                    entry[key] = rows[0]
                elif key in entry:
                    entry[key].copy_(torch.stack(rows))  # where others hold it, too
                else:
                    entry[key] = torch.stack(rows)


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
    held = list(map(id, held_by(optimizers)))
    if len(set(held)) < len(held):
        raise ValueError(
            "a parameter was added to an optimizer that already holds it, and would be updated twice; add only "
            "parameters that no group holds"
        )


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

"""The user's optimizers over the stacked parameters, and the rows that they leave alone."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.communication.world import accumulation_dtype
from gossip.optimizers.bucket_optimizer import OptimizerArgument, build_optimizers, check_parameters_held

Stacks = Mapping[int, Sequence[nn.Parameter]]
"""By the id of each of the module's parameters, its stacks: one per device."""
IMPLEMENTATION = {"capturable": False, "fused": None, "foreach": None}
"""Of a group's constants, those that choose an implementation: the default one runs anywhere."""


def build_stacked_optimizers(optimizer: OptimizerArgument, module: nn.Module, stacks: Stacks) -> tuple[Optimizer, ...]:
    """The optimizers that were given, or that the factory makes, with stacks in the place of ``module``'s parameters.

    They are made over the module's own parameters: a factory that looks at names and shapes groups them as ever.

    Raises
    ------
    TypeError, ValueError
        As :func:`gossip.optimizers.bucket_optimizer.build_optimizers`; or one of them does not update element by
        element.
    """
    optimizers = build_optimizers(optimizer, module, in_backward=True, by_bucket=True)
    for optimizer in optimizers:
        _check_elementwise(optimizer)
        stack_groups(optimizer, stacks)
    return optimizers


def stack_groups(optimizer: Optimizer, stacks: Stacks) -> None:
    """Put stacks in the place of the module's parameters, wherever those stand in the optimizer."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False
            logger.warning(
                "{}: fused=True is run as fused=False: stacks have gaps in memory, which fused kernels do not see",
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
                else copy.deepcopy(value)  # a counter that is a tensor is counted up in place
                for key, value in entry.items()
            }


def num_held(optimizers: Sequence[Optimizer]) -> int:
    """How many parameters the optimizers hold."""
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


def check_stacks_held(optimizers: Sequence[Optimizer], stacks: Stacks) -> None:
    """Refuse a parameter that is not of the module, or that is held twice.

    Raises
    ------
    ValueError
        Says which.
    """
    check_parameters_held(
        optimizers,
        {
            str(number): stack
            for number, stack in enumerate(stack for by_shard in stacks.values() for stack in by_shard)
        },
    )
    held = [
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    if len(set(held)) < len(held):
        raise ValueError(
            "a parameter was added to an optimizer that holds it already, and would be updated twice; add only "
            "parameters that no group holds"
        )


def has_shape(value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of an optimizer's state has one value for each of a parameter's."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def elementwise_keys(entries: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> set[str]:
    """Of the entries of an optimizer's state, by parameter, those with one value for each of the parameter's.

    Parameters without dimensions do not tell, since counters have none either.
    """
    entries = list(entries)
    entries = [(parameter, entry) for parameter, entry in entries if parameter.dim()] or entries
    return {
        key
        for parameter, entry in entries
        for key, value in entry.items()
        if key != "step" and has_shape(value, parameter)
    }


def _check_elementwise(optimizer: Optimizer) -> None:
    """Let it update two small matrices, stacked and apart: replicas must not see each other through their optimizer.

    Raises
    ------
    ValueError
        The two differ.
    """
    source = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 2, 3, 3, generator=source, dtype=torch.float64).unbind()
    for group in optimizer.param_groups:
        apart = [nn.Parameter(row.clone()) for row in values]
        together = nn.Parameter(values.clone())
        try:
            _step_probe(optimizer, group, apart, [gradient.unbind() for gradient in gradients])
            _step_probe(optimizer, group, [together], [[gradient] for gradient in gradients])
        except Exception as error:
            raise ValueError(f"{_refusal(optimizer)} ({' '.join(str(error).split())})") from error
        if not torch.allclose(torch.stack([replica.detach() for replica in apart]), together.detach()):
            raise ValueError(_refusal(optimizer))


def _refusal(optimizer: Optimizer) -> str:
    return (
        f"optimizer {type(optimizer).__name__} updates a parameter as a whole, so that stacked replicas would see each "
        "other; choose one that updates element by element, such as SGD, Adam or AdamW, or train in processes "
        "(GossipDataParallel)"
    )


def _step_probe(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Steps of an optimizer of the same kind and constants over ``parameters``."""
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    constants = group | {key: value for key, value in IMPLEMENTATION.items() if key in group}
    if "lr" in group:
        constants["lr"] = 0.1  # a schedule may begin at 0, where nothing would be seen
    probe.param_groups = [constants | {"params": list(parameters)}]
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
    step: Any = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    for of_replica in gradients:
        for parameter, gradient in zip(parameters, of_replica, strict=True):
            parameter.grad = gradient.clone()
        step(probe)


def row_norms(parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """Euclidean norm of the gradients of each row, over all of ``parameters``, [k]; None without gradients."""
    norms = [
        torch.linalg.vector_norm(parameter.grad.flatten(1), dim=1, dtype=accumulation_dtype(parameter.dtype))
        for parameter in parameters
        if parameter.grad is not None
    ]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0) if norms else None


@contextlib.contextmanager
@torch.no_grad()
def left_alone(optimizers: Sequence[Optimizer], rows: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Steps within the block leave some rows of some parameters, and of what the optimizers know of them, as they are.

    Parameters
    ----------
    optimizers : sequence of Optimizer
    rows : mapping of Parameter to Tensor, [k], bool
        Which; their gradients are set to zero.
    """
    saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for parameter, which in rows.items():
        states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
        values = [value for state in states for value in state.values() if has_shape(value, parameter)]
        saved += [(value, which, value[which]) for value in (parameter.detach(), *values)]
        parameter[which] = 0  # with weight decay a state that is new is then zero too
        if parameter.grad is not None:
            parameter.grad[which] = 0
    try:
        yield
    finally:
        for value, which, before in saved:
            value[which] = before

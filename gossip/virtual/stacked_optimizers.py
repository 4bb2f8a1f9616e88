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

from gossip.optimizers.bucket_optimizer import OptimizerArgument, build_optimizers, check_parameters_held
from gossip.private_torch import note_step_called

Stacks = Mapping[int, Sequence[nn.Parameter]]
"""The stacks of each of the module's parameters, by the parameter's id: one per device."""
COUNTER = "step"
IMPLEMENTATION = {"capturable": False, "fused": None, "foreach": None}
"""The constants of a group that choose an implementation; the default implementation runs anywhere."""


def build_stacked_optimizers(optimizer: OptimizerArgument, module: nn.Module, stacks: Stacks) -> tuple[Optimizer, ...]:
    """Return the given optimizers, or the factory's, with stacks in place of ``module``'s parameters.

    They are made over the module's own parameters, so a factory that inspects names and shapes works as usual.

    Raises TypeError, ValueError: as for :func:`gossip.optimizers.bucket_optimizer.build_optimizers`; or an optimizer
    does not update elementwise.
    """
    optimizers = build_optimizers(optimizer, module, in_backward=True, by_bucket=True)
    for optimizer in optimizers:
        _check_elementwise(optimizer)
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
        type(optimizer).step(optimizer)


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
    return {
        key
        for parameter, entry in entries
        for key, value in entry.items()
        if key != COUNTER and has_shape(value, parameter)
    }


def _check_elementwise(optimizer: Optimizer) -> None:
    """Check on two small matrices, stacked and separate, that replicas do not affect each other through the optimizer.

    Raises ValueError: the two results differ.
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
        f"optimizer {type(optimizer).__name__} updates a parameter as a whole, so stacked replicas would affect each "
        "other; choose one that updates element by element, such as SGD, Adam or AdamW, or train in processes "
        "(GossipDataParallel)"
    )


def _step_probe(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Make steps of an optimizer with the same class and constants over ``parameters``."""
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    constants = group | {key: value for key, value in IMPLEMENTATION.items() if key in group}
    if "lr" in group:
        constants["lr"] = 0.1  # a schedule may start at 0, where nothing would change
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

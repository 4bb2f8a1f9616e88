"""The state of one rank's replica: read for a checkpoint or for a rank that joins, and restored."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.parameters.buffers import unfit_buffers
from gossip.parameters.extra_state import extra_states, load_extra_states
from gossip.parameters.names import named_buffers, named_parameters
from gossip.parameters.serializable_state import compact, is_serializable, state_of, to_serializable
from gossip.step.engine import StepEngine


def optimizer_state(
    optimizer: Optimizer, named: Iterable[tuple[str, torch.Tensor]], *, is_given: bool = False
) -> dict[str, Any]:
    """Return the ``state_dict()`` of an optimizer as plain data; ``named`` is what it updates. Local.

    If it ``is_given`` to a rank that has constructed the same optimizer, it lacks the options of parameter groups that
    are not plain data, such as functions: that rank has its own.
    """
    kind = type(optimizer).__name__
    where = f"the state_dict() of {kind}"
    saved = dict(state_of(optimizer, where))
    names = {id(tensor): name for name, tensor in named}
    held = [names[id(tensor)] for group in optimizer.param_groups for tensor in group["params"]]
    entries = {
        to_serializable(key, f"a key of {where}"): to_serializable(
            entry,
            f"the state of parameter {held[key]!r} in {kind}" if type(key) is int else f"{where}['state'][{key!r}]",
        )
        for key, entry in saved.pop("state").items()
    }
    if is_given:
        saved["param_groups"] = [
            {key: value for key, value in group.items() if is_serializable(value)} for group in saved["param_groups"]
        ]
    return {"state": entries, **to_serializable(saved, where)}


def own_options(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, int, str]]:
    """Yield optimizer, group and name of each option that :func:`optimizer_state` does not give to another rank."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            options = ((key, value) for key, value in group.items() if key != "params")
            yield from ((optimizer, number, key) for key, value in options if not is_serializable(value))


def restore_replica(engine: StepEngine, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> list[str]:
    """Restore module, optimizers and engine in place, and return what could not be restored, in words. Local."""
    left_out = _restore_module(engine.module, state) + load_extra_states(engine.group.module, state.get("extra", {}))
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        _restore_optimizer(optimizer, saved)
    if (scale := state.get("scaler")) is not None:
        if engine.updater.scaler is None:
            left_out.append("the loss scale: the model here has no scaler")
        else:
            engine.updater.scaler.scaler.load_state_dict(scale)
    return left_out + engine.load_state_dict(state["engine"])


def module_state(engine: StepEngine) -> dict[str, dict[str, Any]]:
    """Return parameters, all buffers, extra states, and gradients that no_sync has accumulated. Local.

    The buffers include those that state_dict leaves out. Each value is contained once: a tied parameter has one name.
    """
    module = engine.module
    parameters = dict(named_parameters(module))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {
        "parameters": {name: compact(parameter, name) for name, parameter in parameters.items()},
        "buffers": {name: compact(buffer, name) for name, buffer in named_buffers(module)},
        "gradients": {name: compact(grad, name) for name, grad in gradients.items() if grad is not None},
        "extra": extra_states(engine.group.module),
    }


@torch.no_grad()
def _restore_module(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    scale = state["engine"].get("gradient_scale", 1.0)
    for name, parameter in named_parameters(module):
        parameter.copy_(state["parameters"][name])
        if (gradient := state["gradients"].get(name)) is None:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.device, copy=True)
        if parameter.grad is not None and scale != 1:
            parameter.grad.mul_(scale)
    left_out = unfit_buffers(module, state["buffers"])
    for name, buffer in named_buffers(module):
        if name not in left_out:
            buffer.copy_(state["buffers"][name])
    return list(left_out.values())


def _restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load the state, and undo torch's cast of it to the parameters' dtype (float32 moments of bfloat16 ones)."""
    own = [(number, key, optimizer.param_groups[number][key]) for _, number, key in own_options([optimizer])]
    optimizer.load_state_dict(saved)
    for number, key, value in own:
        optimizer.param_groups[number].setdefault(key, value)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entry = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            loaded = entry.get(key)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                entry[key] = value.to(loaded.device, copy=True)

"""What one rank's file holds, and how it comes back into the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.checkpoints.checkpoint_layout import describe_tensor, optimizers_of, persistent_buffers
from gossip.checkpoints.plain_state import compact, plain
from gossip.checkpoints.random_states import restore_rng_states
from gossip.errors import CheckpointError

if TYPE_CHECKING:
    from gossip.wrapper import GossipDataParallel

SECTIONS: Mapping[str, type] = {
    "parameters": dict,
    "buffers": dict,
    "gradients": dict,
    "optimizers": list,
    "engine": dict,
    "stateful": dict,
    "data": dict,
}
"""What every rank's file has, beside the states of the random number generators."""


class Stateful(Protocol):
    """An object with a state: a scheduler, a GradScaler, a sampler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def is_stateful(part: Any) -> TypeGuard[Stateful]:
    """Whether ``part`` gives and takes its state."""
    is_one = not isinstance(part, type)
    return is_one and all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def parts_state(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states of the parts that have one, and the plain data. Local.

    Raises
    ------
    TypeError
        Names the part that cannot be saved, and what in it.
    """
    stateful, data = {}, {}
    for name, part in parts.items():
        if is_stateful(part):
            stateful[name] = plain(part.state_dict(), f"{name}.state_dict()")
        else:
            data[name] = plain(part, name)
    return {"stateful": stateful, "data": data}


def optimizer_states(model: GossipDataParallel) -> list[dict[str, Any]]:
    """Of all optimizers, compact. Local."""
    return [
        plain(optimizer.state_dict(), f"the state_dict() of {type(optimizer).__name__}")
        for optimizer in optimizers_of(model)
    ]


def module_state(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters, buffers (those too that state_dict leaves out), and gradients that no_sync has accumulated. Local.

    Each value once: a tied parameter has one name.
    """
    parameters = dict(module.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {
        "parameters": {name: compact(parameter, name) for name, parameter in parameters.items()},
        "buffers": {name: compact(buffer, name) for name, buffer in module.named_buffers()},
        "gradients": {name: compact(grad, name) for name, grad in gradients.items() if grad is not None},
    }


def check_sections(state: Any, manifest: Mapping[str, Any], where: str) -> None:
    """Raise unless ``state``, read from a rank's file, has the form that a rank's file has."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} holds a {type(state).__name__}, but no rank's state")
    for section, kind in SECTIONS.items():
        if type(state.get(section)) is not kind:
            raise CheckpointError(f"{where} has no {section!r}")
    found = {f"parameter {name!r}": tensor for name, tensor in state["parameters"].items()}
    found |= {f"buffer {name!r}": tensor for name, tensor in state["buffers"].items()}
    for key, described in manifest["module"].items():
        tensor = found.get(key)
        here = describe_tensor(tensor) if isinstance(tensor, torch.Tensor) else "nothing"
        if here != described:
            raise CheckpointError(f"{where}: {key} is {here}, but {described} in the manifest")


def restore(
    model: GossipDataParallel, state: Mapping[str, Any], engine_state: dict[str, Any], parts: Mapping[str, Stateful]
) -> list[str]:
    """Put ``state`` into model, optimizers, generators and parts, in place. Local.

    Returns
    -------
    list of str
        What could not be restored, in words.
    """
    left_out = _restore_module(model.module, state)
    for optimizer, saved in zip(optimizers_of(model), state["optimizers"], strict=True):
        _restore_optimizer(optimizer, saved)
    left_out += model._live().load_state_dict(engine_state)
    for name, part in parts.items():
        part.load_state_dict(state["stateful"][name])
    if state.get("rng") is not None:  # at last: whatever was called above may have drawn numbers
        left_out += restore_rng_states(state["rng"])
    return left_out


@torch.no_grad()
def _restore_module(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    left_out = []
    for name, parameter in module.named_parameters():
        parameter.copy_(state["parameters"][name])
        gradient = state["gradients"].get(name)
        if gradient is None:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.device, copy=True)
    persistent = {name for name, _ in persistent_buffers(module)}
    for name, buffer in module.named_buffers():
        saved = state["buffers"].get(name)
        if name in persistent or (saved is not None and (saved.shape, saved.dtype) == (buffer.shape, buffer.dtype)):
            buffer.copy_(saved)
        else:
            left_out.append(f"buffer {name!r}, which is not persistent and has another form here")
    return left_out


def _restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load, and undo that torch gives every state the dtype of its parameter (float32 moments of bfloat16 ones)."""
    optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entry = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            loaded = entry.get(key)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                entry[key] = value.to(loaded.device, copy=True)

"""The replica of one rank, which a process of a distributed run holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.checkpoints.checkpoint_layout import (
    describe_buckets,
    describe_module,
    describe_optimizers,
    persistent_buffers,
)
from gossip.checkpoints.plain_state import compact, plain
from gossip.checkpoints.random_states import rng_states
from gossip.checkpoints.rank_averages import averages_over_ranks
from gossip.checkpoints.replicas import Replicas
from gossip.parameters.manifest import describe_topology
from gossip.wrapper import GossipDataParallel


class RankReplica(Replicas):
    """That of a model and its optimizers.

    Parameters
    ----------
    model : GossipDataParallel
    """

    def __init__(self, model: GossipDataParallel) -> None:
        self._model = model
        self._engine = model._live()
        self._world = model._world
        self.ranks = range(model.rank, model.rank + 1)
        self.world_size = self.num_processes = model.world_size
        self.process = model.rank
        self._engine_state: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return self._model.step

    @property
    def _optimizers(self) -> list[Optimizer]:
        optimizer: Any = self._model.optimizer
        if optimizer is None:
            return []
        return list(optimizer) if isinstance(optimizer, tuple | list) else [optimizer]

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        with self._engine.fatal():
            return self._world.gather_bytes(payload, what)

    def check_between_steps(self) -> None:
        self._engine.check_between_steps()

    def check_alive(self) -> None:
        self._engine.check_alive()

    def describe(self) -> dict[str, Any]:
        module = self._model.module
        groups = [
            (type(optimizer).__name__, [group["params"] for group in optimizer.param_groups])
            for optimizer in self._optimizers
        ]
        return {
            "module": describe_module(module),
            "optimizers": describe_optimizers(groups, module.named_parameters()),
            "buckets": describe_buckets(self._engine.buckets),
            "unfrozen": [list(names) for names in self._engine.unfrozen],
            "topology": describe_topology(self._model.topology),
            "compression": self._model.compression.describe(),
        }

    @functools.cached_property
    def _optimizer_states(self) -> list[dict[str, Any]]:
        return [
            plain(optimizer.state_dict(), f"the state_dict() of {type(optimizer).__name__}")
            for optimizer in self._optimizers
        ]

    def check_savable(self) -> None:
        _ = self._optimizer_states

    def settle(self) -> None:
        self._engine.frozen.compare()
        self._engine_state = self._engine.state_dict()

    def states(self) -> Iterator[dict[str, Any]]:
        yield {
            **_module_state(self._model.module),
            "optimizers": self._optimizer_states,
            "engine": self._engine_state,
            "rng": rng_states(),
        }

    def unfreeze(self, names: Sequence[str]) -> None:
        self._engine.unfreeze(names)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        (state,) = states
        left_out = _restore_module(self._model.module, state)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            _restore_optimizer(optimizer, saved)
        return left_out + self._engine.load_state_dict(state["engine"])

    def averages(self, path: Path) -> dict[str, torch.Tensor]:
        return averages_over_ranks(self, self._engine, self._world, path)


def _module_state(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
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


@torch.no_grad()
def _restore_module(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    left_out, scale = [], state["engine"].get("gradient_scale", 1.0)
    for name, parameter in module.named_parameters():
        parameter.copy_(state["parameters"][name])
        gradient = state["gradients"].get(name)
        if gradient is None:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.device, copy=True)
        if parameter.grad is not None and scale != 1:
            parameter.grad.mul_(scale)
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

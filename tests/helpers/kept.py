"""Objects that live beside a model: schedulers of every form, and an average over time."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": functools.partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "linear": functools.partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=100_000),
    "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=60),
    "restarts": functools.partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=7),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9), lr_scheduler.ExponentialLR(optimizer, 0.95)],
        [9],
    ),
    "step": functools.partial(lr_scheduler.StepLR, step_size=4, gamma=0.8),
    "lambda": functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "one cycle": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=400_000),
    "plateau": functools.partial(lr_scheduler.ReduceLROnPlateau, factor=0.9, patience=2, eps=0.0),
}


def advance(scheduler: Any) -> None:
    """Step it; the loss of one that looks at losses never falls."""
    scheduler.step(*(1.0,) * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


class Ema:
    """An exponential average of a module's parameters over its steps."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        self.num_updates = 0

    def update(self, module: nn.Module) -> None:
        self.num_updates += 1
        for name, parameter in module.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.num_updates = dict(state["values"]), state["num_updates"]


class Failing(Ema):
    """Its state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no memory left")

"""Closures of ``optimizer.step(closure)``, evaluated before messages in flight are mixed in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

Closure = Callable[[], Any]


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` requires a closure, which it then evaluates as often as it likes, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluate_first(optimizer: Optimizer, closure: Closure) -> Any:
    """Evaluate a closure that ``step()`` does not require, and return the loss; the optimizer then steps without it.

    When this is done before the exchange is combined, gradients are computed at x(t), and the messages have this time
    to arrive, as in a loop without a closure.
    """
    if optimizer.__dict__.get("found_inf") is not None:
        raise ValueError(
            "scaler.step(optimizer, closure) cannot work: the scaler looks for overflows before the closure is "
            "evaluated; evaluate it yourself, then call scaler.step(optimizer)"
        )
    with torch.enable_grad():
        return closure()

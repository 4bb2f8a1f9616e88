"""Closures of ``optimizer.step(closure)``, evaluated before what is in flight is mixed in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.errors import GossipError

Closure = Callable[[], Any]


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether its ``step()`` has a closure as a required argument: it evaluates that as it likes, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class EvaluatedClosure:
    """What an optimizer is given in place of a closure that was evaluated ahead: it tells the loss, once.

    Nearly all optimizers evaluate their closure once, before anything else. Evaluated ahead of the exchange its
    gradients are taken at x(t), and the messages have that time to arrive, as in a loop without a closure.

    Parameters
    ----------
    optimizer : Optimizer
        Its ``step()`` can do without a closure.
    closure : callable
        Called here.

    Attributes
    ----------
    loss : object
        What the closure has returned.

    Raises
    ------
    ValueError
        A GradScaler steps the optimizer: it has looked at gradients that the closure replaces.
    """

    def __init__(self, optimizer: Optimizer, closure: Closure) -> None:
        if optimizer.__dict__.get("found_inf") is not None:
            raise ValueError(
                "scaler.step(optimizer, closure) cannot work: the scaler looks for overflows before the closure is "
                "evaluated; evaluate it yourself, then call scaler.step(optimizer)"
            )
        with torch.enable_grad():
            self.loss = closure()
        self._optimizer = optimizer
        self._where = ""
        self._seen: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._was_called = False

    def hand_over(self, where: str) -> None:
        """The optimizer is about to be stepped; ``where``, for an error."""
        self._where = where
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._seen = [(parameter, parameter._version, parameter.grad) for parameter in parameters]

    def __call__(self) -> Any:
        """The loss.

        Raises
        ------
        GossipError
            The optimizer wants it at another point.
        """
        is_elsewhere = any(
            parameter._version != version or parameter.grad is not gradient
            for parameter, version, gradient in self._seen
        )
        if self._was_called or is_elsewhere:
            when = "again" if self._was_called else "after it has changed parameters or gradients"
            raise GossipError(
                f"{self._where}: {type(self._optimizer).__name__}.step(closure) evaluates the closure {when}, but one "
                "that can do without is evaluated once, before the exchange is mixed in; let its step() require the "
                "closure, in a subclass: def step(self, closure): return super().step(closure)"
            )
        self._was_called = True
        return self.loss

"""Closures of ``optimizer.step(closure)``, evaluated before messages in flight are mixed in."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.errors import GossipError

Closure = Callable[[], Any]


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` requires a closure, which it then evaluates as often as it likes, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class EvaluatedClosure:
    """The replacement for a closure that was evaluated in advance: it returns the loss, once.

    Nearly all optimizers evaluate their closure once, before anything else. When it is evaluated before the exchange is
    combined, its gradients are computed at x(t), and the messages have this time to arrive, as in a loop without a
    closure.
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
        """Note that the optimizer is about to be stepped; ``where`` is for error texts."""
        self._where = where
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._seen = [(parameter, parameter._version, parameter.grad) for parameter in parameters]

    def __call__(self) -> Any:
        """Return the loss."""
        is_elsewhere = any(
            parameter._version != version or parameter.grad is not gradient
            for parameter, version, gradient in self._seen
        )
        if self._was_called or is_elsewhere:
            when = "again" if self._was_called else "after it has changed parameters or gradients"
            raise GossipError(
                f"{self._where}: {type(self._optimizer).__name__}.step(closure) evaluates the closure {when}, but a "
                "closure that step() does not require is evaluated once, before the exchange is mixed in; make it "
                "required in a subclass: def step(self, closure): return super().step(closure)"
            )
        self._was_called = True
        return self.loss

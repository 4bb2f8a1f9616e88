"""Optimizers that would step a wrapped model's parameters behind its back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossip.errors import GossipError


class OptimizerWatch:
    """Raises when an optimizer is stepped that holds a parameter of an open model, but is not one of its own.

    Its gradients have been used up inside backward, or its step would not be exchanged: in both cases the loop would
    train something else than it says, without an error.

    Parameters
    ----------
    parameters : iterable of (str, Parameter)
    optimizers : iterable of Optimizer
        The model's own.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizers: Iterable[Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters}
        self._is_paused = False
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        _watches.add(self)
        _look_at_every_step()

    def check(self, optimizer: Optimizer) -> None:
        """Raise if it holds a parameter of this model, but is none of the model's own. Local."""
        if self._is_paused or optimizer in self._known:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    raise GossipError(
                        f"{type(optimizer).__name__}.step(): parameter {self._names[id(parameter)]!r} belongs to a "
                        "GossipDataParallel, which is stepped by its own optimizer only; give this one to "
                        "GossipDataParallel(module, optimizer), for the usual loop with step_in_backward=False"
                    )
        self._known.add(optimizer)  # somebody else's business

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While the model's own optimizers step, which may have others inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        """Look no more. Local."""
        _watches.discard(self)


_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()


@functools.cache
def _look_at_every_step() -> None:
    """Have torch call all watches before any optimizer steps.

    One hook, which stays: a hook of each model's own would be removed when the garbage collector finds the model, and
    that may be while torch goes through its hooks.
    """

    def on_step(optimizer: Optimizer, *_: Any) -> None:
        for watch in tuple(_watches):
            watch.check(optimizer)

    register_optimizer_step_pre_hook(on_step)

"""Detection of foreign optimizers that step a wrapped model's parameters."""

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
    """Raises when an optimizer is stepped that holds a parameter of an open model but is not one of the model's own.

    Either its gradients have been used up inside backward, or its step would not be exchanged: in both cases the loop
    would silently train something other than it says.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizers: Iterable[Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters}
        self._is_paused = False
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        _watches.add(self)
        _look_at_every_step()

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer holds a parameter of this model but is not one of the model's own. Local."""
        if self._is_paused or optimizer in self._known:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    raise GossipError(
                        f"{type(optimizer).__name__}.step(): parameter {self._names[id(parameter)]!r} belongs to a "
                        "GossipDataParallel, which only its own optimizer steps; pass this one to "
                        "GossipDataParallel(module, optimizer), for the usual loop with step_in_backward=False"
                    )
        self._known.add(optimizer)  # it does not concern this model

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend the watch while the model's own optimizers step, as they may contain others."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        """Stop watching. Local."""
        _watches.discard(self)


_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()


@functools.cache
def _look_at_every_step() -> None:
    """Have torch call all watches before any optimizer steps.

    There is a single permanent hook. A hook for each model would be removed when the garbage collector finds the model,
    possibly while torch iterates over its hooks.
    """

    def on_step(optimizer: Optimizer, *_: Any) -> None:
        for watch in tuple(_watches):
            watch.check(optimizer)

    register_optimizer_step_pre_hook(on_step)

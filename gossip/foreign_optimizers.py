"""Optimizers that would step a wrapped model's parameters behind its back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

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
        # As a plain function of a weak reference: the hook is the process's, and must not keep the model.
        watch = weakref.ref(self)

        def on_step(optimizer: Optimizer, *_: Any) -> None:
            found = watch()
            if found is not None:
                found._check(optimizer)

        self._handle: RemovableHandle = register_optimizer_step_pre_hook(on_step)

    def _check(self, optimizer: Optimizer) -> None:
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
        self._handle.remove()

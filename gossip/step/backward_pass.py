"""What the engine needs to know of torch's autograd."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from gossip.errors import GossipError
from gossip.private_torch import at_end_of_backward, backward_task, fast_range, is_autograd_compiled, tree_leaves


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and objects, each once."""
    seen: set[int] = set()
    pending = [output]
    while pending:
        for leaf in tree_leaves(pending.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and id(leaf) not in seen:
                seen.add(id(leaf))
                pending.extend(vars(leaf).values())


def refuse_compiled_autograd() -> None:
    """Raise where no hook would be called."""
    if is_autograd_compiled():
        raise GossipError(
            "torch._dynamo.config.compiled_autograd is on: it compiles backward passes without the hooks that make the "
            "steps; turn it off, or wrap the module with step_in_backward=False"
        )


class BackwardPass:
    """The backward pass that runs in this thread, watched from all threads.

    One that is ended by an exception calls nobody, but lets go of what it would have called at its end. Threads tell
    nothing: passes on a device run in autograd's own, passes of a checkpoint's inside another one.

    Parameters
    ----------
    on_end : callable
        Called when all gradients of the pass are there.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        def call() -> None:
            on_end()

        self._call = weakref.ref(call)  # autograd's is the only reference that lasts
        at_end_of_backward(call)

    @property
    def is_under_way(self) -> bool:
        """False once it has ended, or was ended."""
        return self._call() is not None

    def wait(self, patience: timedelta) -> None:
        """Until it is no longer under way: a device's thread lets go a little after the error has been raised."""
        end = time.monotonic() + patience.total_seconds()
        while self.is_under_way and time.monotonic() < end:
            time.sleep(0.001)


class BackwardRange:
    """The profiler's range ``gossip::backward``, from the first hook of a backward pass to its end."""

    def __init__(self) -> None:
        self._open: tuple[int, AbstractContextManager[Any]] | None = None

    def begin(self) -> None:
        """In the thread that runs the pass."""
        self._open = threading.get_ident(), fast_range("gossip::backward")
        self._open[1].__enter__()

    def end(self) -> None:
        """A device's pass may end in another thread than it began in; its range is left open."""
        if self._open is not None and self._open[0] == threading.get_ident():
            self._open[1].__exit__(None, None, None)
        self._open = None


DEAD_BACKWARD = (
    "was ended by an exception; some buckets were updated and sent and others not: this rank cannot "
    "go on, start again from a checkpoint. If it was about an in-place modification: of several backward passes in a "
    "step put all but the last under no_sync(); a module that uses a detached weight twice needs step_in_backward=False"
)

TWO_MODELS = (
    "one backward pass makes steps of two models. If it only passes through one of them, as a GAN's generator loss "
    "does, put that one under no_sync() and zero its gradients, or freeze it meanwhile"
)
_latest_step: list[Any] = [-1, lambda: None]  # id of the backward pass, and a weak reference to who makes it a step


def steps_another_model(owner: object) -> bool:
    """Note that the backward pass that runs is a step of ``owner``; whether it has been somebody else's already."""
    task = backward_task()
    found = _latest_step[1]() if _latest_step[0] == task else None
    _latest_step[:] = [task, weakref.ref(owner)]
    return found is not None and found is not owner

"""What the engine needs to know of torch's autograd."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gossip.errors import GossipError
from gossip.ranges import profiler_range


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
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.compiled_autograd:
        raise GossipError(
            "torch._dynamo.config.compiled_autograd is on: it compiles backward passes without the hooks that make the "
            "steps; turn it off, or wrap the module with step_in_backward=False"
        )


class BackwardRange:
    """The profiler's range ``gossip::backward``, from the first hook of a backward pass to its end."""

    def __init__(self) -> None:
        self._open: tuple[int, AbstractContextManager[Any]] | None = None

    def begin(self) -> None:
        """In the thread that runs the pass."""
        self._open = threading.get_ident(), profiler_range("gossip::backward")
        self._open[1].__enter__()

    def end(self) -> None:
        """A device's pass may end in another thread than it began in; its range is left open."""
        if self._open is not None and self._open[0] == threading.get_ident():
            self._open[1].__exit__(None, None, None)
        self._open = None


TWO_MODELS = (
    "one backward pass makes steps of two models. If it only passes through one of them, as a GAN's generator loss "
    "does, put that one under no_sync() and zero its gradients, or freeze it meanwhile"
)
_latest_step: list[Any] = [-1, lambda: None]  # id of the backward pass, and a weak reference to who makes it a step


def steps_another_model(owner: object) -> bool:
    """Note that the backward pass that runs is a step of ``owner``; whether it has been somebody else's already."""
    task = torch._C._current_graph_task_id()
    found = _latest_step[1]() if _latest_step[0] == task else None
    _latest_step[:] = [task, weakref.ref(owner)]
    return found is not None and found is not owner

"""The engine's knowledge of torch's autograd, and of the progress of a step."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossip.errors import GossipError
from gossip.exchange.rank_exchanges import AnyBucket
from gossip.measuring.step_stats import Meter
from gossip.private_torch import at_end_of_backward, backward_task, fast_range, is_autograd_compiled, tree_leaves


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and objects, each once."""
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
    """Raise if backward passes are compiled, because no hook would be called."""
    if is_autograd_compiled():
        raise GossipError(
            "torch._dynamo.config.compiled_autograd is on: it compiles backward passes without the hooks that make the "
            "steps; turn it off, or wrap the module with step_in_backward=False"
        )


class BackwardPass:
    """The backward pass that runs in this thread, watched from all threads, and the profiler's ``gossip::backward``.

    A pass that an exception ends does not call ``on_end``, but releases the reference to it. Thread identity is no
    indication: passes on a device run in autograd's own threads, and passes of a checkpoint run inside another pass.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        call = partial(on_end)
        self._call = weakref.ref(call)  # autograd holds the only lasting reference
        at_end_of_backward(call)
        self.began_at, self._thread = time.perf_counter(), threading.get_ident()
        self._range = fast_range("gossip::backward")
        self._range.__enter__()

    @property
    def is_under_way(self) -> bool:
        """Whether the pass has neither ended nor been ended by an exception."""
        return self._call() is not None

    def wait(self, patience: timedelta) -> None:
        """Wait until the pass has ended: a device's thread releases it a little after the error was raised."""
        end = time.monotonic() + patience.total_seconds()
        while self.is_under_way and time.monotonic() < end:
            time.sleep(0.001)

    def end(self) -> float:
        """Close the profiler's range, unless a device's pass ends in another thread; return how long it took."""
        if self._thread == threading.get_ident():
            self._range.__exit__(None, None, None)
        return time.perf_counter() - self.began_at


DEAD_BACKWARD = (
    "was ended by an exception when some buckets had been updated and sent and others had not, so this rank cannot "
    "continue; start again from a checkpoint. If the exception concerned an in-place modification: of several "
    "backward passes in one step, put all but the last under no_sync(); a module that uses a detached weight twice "
    "needs step_in_backward=False"
)

TWO_MODELS = (
    "one backward pass makes steps of two models. If it only passes through one of them, as a GAN's generator loss "
    "does, put that one under no_sync() and zero its gradients, or freeze it for the duration"
)
# The id of the backward pass, and a weak reference to the model that makes a step of it.
_latest_step: list[Any] = [-1, lambda: None]


def steps_another_model(owner: object) -> bool:
    """Record that the running backward pass is a step of ``owner``; return whether it already is another model's."""
    task = backward_task()
    found = _latest_step[1]() if _latest_step[0] == task else None
    _latest_step[:] = [task, weakref.ref(owner)]
    return found is not None and found is not owner


class GradientHooks:
    """One hook for every parameter that is in a bucket."""

    def __init__(self, make_hook: Callable[[int, int], Callable[[torch.Tensor], None]]) -> None:
        self._make_hook = make_hook
        self._handles: dict[tuple[int, int], RemovableHandle] = {}

    def add(self, buckets: Iterable[AnyBucket]) -> None:
        """Register hooks for all parameters of these buckets."""
        for bucket in buckets:
            for place, parameter in enumerate(bucket.parameters):
                requires_grad = parameter.requires_grad  # False if only a checkpoint requires it to be exchanged
                parameter.requires_grad_(True)
                hook = self._make_hook(bucket.index, place)
                self._handles[bucket.index, place] = parameter.register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(requires_grad)

    def are_followed(self, parameter: torch.Tensor, index: int, place: int) -> bool:
        """Return whether hooks that were registered later are still to be called for the newest gradient."""
        hooks = parameter._post_accumulate_grad_hooks
        return bool(next(reversed(hooks)) != self._handles[index, place].id)

    def close(self) -> None:
        """Remove the hooks. Local."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class StepProgress:
    """The progress of the current step; every step has its own."""

    def __init__(self, buckets: Sequence[AnyBucket]) -> None:
        self.awaited_gradients = [set(bucket.places) for bucket in buckets]
        self.num_launched = 0  # buckets are launched in index order, which is the same on every rank
        self.backward: BackwardPass | None = None  # the pass at whose end the step is made
        self.has_gradients = False
        self.is_unreduced = False  # the newest backward pass only accumulated
        self.was_reduced = False  # a backward pass has averaged gradients over the ranks that hold this replica
        self.is_counting = False  # there are gradients and no bucket is withheld
        self.has_begun = False
        self.stepped: list[Optimizer] = []  # stepped by the user in this step
        self.is_directed = False  # the algorithm has seen the gradients of optimizers that the user steps
        self.meter = Meter()
        self._withheld_by = 0  # a thread's identifier

    def count_gradients(self) -> None:
        """Note the first gradient; no bucket is withheld."""
        self.has_gradients = self.is_counting = True
        self._withheld_by = 0

    def withhold(self) -> None:
        """Note that a complete bucket must not be launched before the other hooks of this gradient have been called."""
        self.is_counting = False
        self._withheld_by = threading.get_ident()

    @property
    def may_release(self) -> bool:
        """Whether a withheld bucket's other hooks have been called, as this thread got another gradient."""
        return self._withheld_by == threading.get_ident()

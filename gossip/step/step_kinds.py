"""Steps made by backward passes: bucket by bucket, or at their end if all gradients are needed first.

Or where the user calls ``optimizer.step()``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.errors import warn_user
from gossip.exchange.rank_exchanges import AnyBucket
from gossip.optimizers.bucket_optimizer import Closure, EvaluatedClosure, fire_step_hooks, requires_closure
from gossip.step.backward_pass import TWO_MODELS, steps_another_model
from gossip.step.engine import StepEngine


class BackwardSteps(StepEngine):
    """A step is made in the backward pass of its gradients; ``optimizer.step()`` has nothing left to do."""

    def begin_forward(self) -> None:
        super().begin_forward()
        self.frozen.hook(self._on_unfrozen_gradient)

    def step_optimizer(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        if self._optimizer_steps:
            return self._step_own(optimizer)
        self.optimizer_step_calls.note(optimizer, closure, self.step, self._has_gradients)
        return None  # the update has been made

    def _step_own(self, optimizer: Optimizer) -> Any:
        """Make the step that the engine requests."""
        return type(optimizer).step(optimizer)

    # ------------------------------------------------------------------ inside a backward pass

    def _on_unfrozen_gradient(self, parameter: torch.Tensor) -> None:
        """React to a parameter whose bucket is created when the step begins; it may be the only one with a gradient."""
        if self.synchronise and not self._progress.has_gradients:
            self._on_first_gradient(parameter)

    def _make_hook(self, index: int, slot: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            progress = self._progress
            if progress.is_counting and self.synchronise:
                awaited = progress.awaited_gradients[index]
                if len(awaited) > 1 and slot in awaited:  # the usual case, once per parameter and step
                    awaited.remove(slot)
                    return
            on_first_or_last_gradient(parameter)

        def on_first_or_last_gradient(parameter: torch.Tensor) -> None:
            if not self.synchronise:
                return
            if not self._progress.has_gradients:
                self._on_first_gradient(parameter)
            progress = self._progress
            if progress.may_release:
                self._launch_ready()
            if progress.num_launched > index:
                self.refuse_late_gradient(index, self.buckets[index].names[slot])
            awaited = progress.awaited_gradients[index]
            awaited.discard(slot)
            if not awaited and index == progress.num_launched:
                self._on_complete(parameter, index, slot)

        return on_gradient

    def _on_first_gradient(self, parameter: torch.Tensor) -> None:
        if self.is_averaged:
            parameter.grad = None
        self.check_usable()
        self._queue_callback()
        self._progress.count_gradients()
        if not self._has_warned and steps_another_model(self):
            self._has_warned = True
            warn_user(f"rank {self.rank}: step {self.step}: {TWO_MODELS}")

    def _on_complete(self, parameter: torch.Tensor, index: int, slot: int) -> None:
        """React to the last gradient, that of ``parameter``, of the bucket whose turn it is."""

    def _launch_ready(self) -> None:
        """Launch a bucket that was withheld until the other hooks of a gradient had been called."""


class BucketwiseSteps(BackwardSteps):
    """Each bucket is combined, updated and sent inside the backward pass, as soon as its last gradient is complete."""

    def _step_own(self, optimizer: Optimizer) -> Any:
        return fire_step_hooks(optimizer)

    def _on_complete(self, parameter: torch.Tensor, index: int, slot: int) -> None:
        if self._gradient_hooks.are_followed(parameter, index, slot):
            # Those hooks must find the gradient too; launched with the next gradient or at the end.
            self._progress.withhold()
        else:
            self._launch_ready()

    def _launch_ready(self) -> None:
        with self.fatal(), self._launching:
            progress = self._progress
            progress.count_gradients()
            while progress.num_launched < len(self.buckets):
                if progress.awaited_gradients[progress.num_launched]:
                    break
                if not self.buckets[progress.num_launched].parameters:
                    break  # a bucket of buffers, which the backward pass may still write
                self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        progress = self._progress
        bucket = self.buckets[progress.num_launched]
        if progress.num_launched == 0:
            self._begin_step()
        progress.num_launched += 1
        bucket.reclaim()
        self._check_was_combined(bucket)
        self.group.reduce_(bucket.parameters, self.step, bucket.index)
        norm = self.updater.measure_bucket(bucket, self.step, progress.meter)  # while messages may still be in flight
        indices = (bucket.index,)
        with self._lock:  # another thread's forward pass may be combining: wait for it
            self._order.begin(indices, self.step, progress.meter)
        with self._watch.pause():
            self.updater.update_bucket(bucket, norm, progress.meter, partial(self._order.direct, indices, self.step))
        self._order.end(indices, self.step, progress.meter)
        self.group.updated(bucket.index)

    def _make_rest(self) -> None:
        while self._progress.num_launched < len(self.buckets):  # some buckets wait for gradients that were not computed
            self._launch_next()

    def _fire_step_hooks(self) -> None:
        with self._stepping_optimizers():
            for optimizer in self.updater.optimizers:
                optimizer.step()


class GatheredSteps(BackwardSteps):
    """All buckets are updated at the end of the backward pass: a global norm or a loss scale needs every gradient."""

    def _make_rest(self) -> None:
        for bucket in self.buckets:
            self.group.reduce_(bucket.parameters, self.step, bucket.index)
        self._begin_all()
        with self._stepping_optimizers():
            self.updater.update_all(self.step, self._progress.meter, self._direct_all)
        self._end_all()


class OptimizerSteps(StepEngine):
    """Backward passes only accumulate gradients; all optimizers of a model together make one step."""

    _updates_when_idle = False

    def _hook_parameters(self, buckets: Sequence[AnyBucket]) -> None:
        """Watch for gradients only if they must be averaged over the ranks that train a replica together."""
        if self.group.averages_gradients:
            super()._hook_parameters(buckets)

    def _make_hook(self, index: int, slot: int) -> Callable[[torch.Tensor], None]:
        del index, slot
        return self._on_gradient

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self.synchronise:
            self._queue_callback()
        else:
            self._progress.is_unreduced = True

    def _complete_gradients(self, *, is_idle: bool = False) -> None:
        had_gradients = is_idle and self._has_gradients()
        super()._complete_gradients(is_idle=is_idle)
        for bucket in self.buckets:
            self.group.reduce_(bucket.parameters, self.step, bucket.index)
        self._progress.was_reduced |= self.group.is_shared and self._has_gradients()
        if is_idle and self._has_gradients() and not had_gradients:
            raise self.refusal(
                "idle_step() on this rank, but other ranks of its group have made "
                "a backward pass; with step_in_backward=False all ranks of a group must be idle together"
            )

    def step_optimizer(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        self.check_usable()
        if closure is not None and not requires_closure(optimizer):
            closure = EvaluatedClosure(optimizer, closure)
            self.check_usable()
        with self.fatal():
            progress = self._progress
            if any(stepped is optimizer for stepped in progress.stepped):
                raise self.refusal(
                    f"{type(optimizer).__name__}.step() was called twice, but not "
                    "every optimizer once; all optimizers of a model together make one step: step each of them once, "
                    "or wrap the parts of the model separately"
                )
            if not progress.stepped:
                self._check_reduced()
                self._begin_step()
                self.check_places()
                self._begin_all(looks_at_gradients=closure is None or isinstance(closure, EvaluatedClosure))
            with self._stepping_optimizers():
                result = self.updater.update_by(optimizer, closure, self.step, progress.meter, self._direct_once)
            progress.stepped.append(optimizer)
            if len(progress.stepped) == len(self.updater.optimizers):
                self.updater.settle_scale()
                self._end_all()
                self._finish_step()
            return result

    def _check_reduced(self) -> None:
        group = self.group
        if not group.is_shared:
            return
        if self._progress.is_unreduced and group.size > 1:
            raise self.refusal(
                "the last backward pass before optimizer.step() was under no_sync(), so its gradients have not been "
                "averaged over the ranks of the group; make the last pass of each step outside of it"
            )
        # A backward pass hands the gradients of a divided module over to the parameters that are exchanged.
        divided = group.module is not self.module
        if (divided or not self._progress.was_reduced) and any(p.grad is not None for p in group.module.parameters()):
            raise self.refusal(
                "there are gradients that did not come from a backward pass, so "
                "they have not been averaged over the ranks of the group; in place of writing them to .grad, have a "
                "backward pass make them, as (parameter * gradient).sum().backward() does"
            )

    def _direct_once(self) -> None:
        if not self._progress.is_directed:
            self._progress.is_directed = True
            self._direct_all()

    def _make_rest(self) -> None:
        if self._progress.stepped:
            raise self.refusal("idle_step() after one of several optimizers was stepped; step all of them, or none")
        self._begin_all(looks_at_gradients=False)
        self.updater.idle()
        self._end_all()

    def _drop_dead_step(self) -> None:
        self._drop_shared_gradients()
        self._progress.backward = None

"""Steps that are made where the user calls ``optimizer.step()``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.exchange.rank_exchanges import AnyBucket
from gossip.optimizers.bucket_optimizer import Closure, EvaluatedClosure, requires_closure
from gossip.step.engine import StepEngine


class OptimizerSteps(StepEngine):
    """Backward passes only accumulate gradients; all optimizers of a model together make one step."""

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

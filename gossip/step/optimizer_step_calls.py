"""The user's calls of ``optimizer.step()`` where backward passes make the steps."""

from __future__ import annotations

from collections.abc import Callable

from loguru import logger
from torch.optim import Optimizer


class OptimizerStepCalls:
    """Refuses calls that expect more than a backward pass does, and warns once where it has made more or nothing.

    A loop written for DistributedDataParallel may accumulate gradients over several backward passes without
    ``no_sync()`` and call ``optimizer.step()`` after the last one. Or its gradients do not come from a backward pass at
    all, or only from passes under ``no_sync()``: then no step is made. Users who never call it get no warning.
    """

    def __init__(self, where: str, usual_loop: str) -> None:
        self._where, self._usual_loop = where, usual_loop
        self._num_steps = 0  # made by backward passes since the last call
        self._steps_seen: dict[Optimizer, int] = {}  # by the newest call for each
        self._has_warned = self._has_warned_of_nothing = False

    def count_step(self) -> None:
        """Count a step that a backward pass has made."""
        self._num_steps += 1

    def note(
        self,
        optimizer: Optimizer,
        closure: Callable[[], float] | None,
        step: int,
        has_gradients: Callable[[], bool],
    ) -> None:
        """Note that the user has called ``optimizer.step(closure)``, which is about to do nothing."""
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) cannot work here, because the update was made inside backward; call it "
                f"without closure, or {self._usual_loop}"
            )
        if optimizer.__dict__.pop("found_inf", None) is not None:
            optimizer.__dict__.pop("grad_scale", None)  # what the next backward pass would apply
            raise ValueError(
                "scaler.step() cannot work here, because the update was made inside backward; pass the scaler to "
                f"GossipDataParallel(scaler=...) and call only scaler.scale(loss).backward(), or {self._usual_loop}"
            )
        num_steps, self._num_steps = self._num_steps, 0
        if num_steps > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "{}step {}: {} steps were made since the last optimizer.step(), one by each backward pass; to "
                "accumulate their gradients into one step, put all but the last backward pass under no_sync(), or {}",
                self._where,
                step,
                num_steps,
                self._usual_loop,
            )
        is_new = step != self._steps_seen.get(optimizer, 0)
        self._steps_seen[optimizer] = step
        if not is_new and not self._has_warned_of_nothing and has_gradients():
            self._has_warned_of_nothing = True
            logger.warning(
                "{}step {}: optimizer.step() did nothing: there are gradients, but no backward pass has made a step of "
                "them. Steps are made by backward passes outside of no_sync(); have the last one of each step there. "
                "If gradients are written to .grad (torch.autograd.grad, torch.func, gradient surgery), {}",
                self._where,
                step,
                self._usual_loop,
            )

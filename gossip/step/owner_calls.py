"""The user's calls of ``optimizer.step()`` where backward passes make the steps."""

from __future__ import annotations

from collections.abc import Callable

from loguru import logger
from torch.optim import Optimizer


class OwnerCalls:
    """Refuses calls that expect more than a backward pass does, and warns that each backward pass makes a step.

    A loop written for DistributedDataParallel may accumulate gradients over several backward passes without
    ``no_sync()`` and call ``optimizer.step()`` after the last one. Users who never call it get no warning.

    Parameters
    ----------
    rank : int
        This rank, for the texts.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_steps = 0  # made by backward passes since the last call
        self._has_warned = False

    def count_step(self) -> None:
        """Count a step that a backward pass has made."""
        self._num_steps += 1

    def note(self, optimizer: Optimizer, closure: Callable[[], float] | None, step: int) -> None:
        """Note that the user has called ``optimizer.step(closure)``, which is about to do nothing.

        Raises
        ------
        ValueError
            The call was meant to do something.
        """
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) cannot work here, because the update was made inside backward; call it "
                "without closure, "
                "or wrap the module with step_in_backward=False"
            )
        if optimizer.__dict__.get("found_inf") is not None:
            raise ValueError(
                "scaler.step() cannot work here, because the update was made inside backward; pass the scaler to "
                "GossipDataParallel(scaler=...) and call only scaler.scale(loss).backward(), or keep the usual "
                "loop with step_in_backward=False"
            )
        num_steps, self._num_steps = self._num_steps, 0
        if num_steps > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank {}: step {}: {} steps were made since the last optimizer.step(), one by each backward pass; to "
                "accumulate their gradients into one step, put all but the last backward pass under no_sync(), or wrap "
                "the module with step_in_backward=False",
                self._rank,
                step,
                num_steps,
            )

"""What an owner's calls of ``optimizer.step()`` tell, where backward passes have made the steps."""

from __future__ import annotations

from collections.abc import Callable

from loguru import logger
from torch.optim import Optimizer


class OwnerCalls:
    """Refuses calls that expect more than a backward pass does, and points out that each one makes a step.

    A loop written for DistributedDataParallel may accumulate gradients over several backward passes without
    ``no_sync()``, and call ``optimizer.step()`` after the last one. Owners who never call it mean what they do.

    Parameters
    ----------
    rank : int
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_steps = 0  # made by backward passes since the last call
        self._has_warned = False

    def count_step(self) -> None:
        """A backward pass has made a step."""
        self._num_steps += 1

    def note(self, optimizer: Optimizer, closure: Callable[[], float] | None, step: int) -> None:
        """The owner has called ``optimizer.step(closure)``, and it is about to do nothing.

        Raises
        ------
        ValueError
            It was to do something.
        """
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) cannot work here: the update has been made inside backward; call it without, "
                "or wrap the module with step_in_backward=False"
            )
        if optimizer.__dict__.get("found_inf") is not None:
            raise ValueError(
                "scaler.step() cannot work here: the update has been made inside backward; give the scaler to "
                "GossipDataParallel(scaler=...) and call only scaler.scale(loss).backward(), or keep the usual "
                "loop with step_in_backward=False"
            )
        num_steps, self._num_steps = self._num_steps, 0
        if num_steps > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank {}: step {}: {} steps were made since the last optimizer.step(), one by each backward pass; to "
                "accumulate their gradients into one step put all but the last backward pass under no_sync(), or wrap "
                "the module with step_in_backward=False",
                self._rank,
                step,
                num_steps,
            )

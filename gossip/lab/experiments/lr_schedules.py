"""Learning-rate schedules over the steps of a run, as multiples of the optimizer's learning rate."""

import math
from collections.abc import Callable
from typing import Annotated

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Fraction = Annotated[float, Field(ge=0, le=1)]


def constant(optimizer: Optimizer, total_steps: int, *, warmup_fraction: Fraction = 0.0) -> LambdaLR:
    """A linear warm-up, then a constant learning rate; parameters as for :func:`cosine`."""
    return _schedule(optimizer, total_steps, warmup_fraction, 1.0, lambda _: 1.0)


def linear(
    optimizer: Optimizer, total_steps: int, *, warmup_fraction: Fraction = 0.0, final_fraction: Fraction = 0.0
) -> LambdaLR:
    """A linear warm-up, then linear decay to ``final_fraction`` of the rate; parameters as for :func:`cosine`."""
    return _schedule(optimizer, total_steps, warmup_fraction, final_fraction, lambda progress: 1 - progress)


def cosine(
    optimizer: Optimizer, total_steps: int, *, warmup_fraction: Fraction = 0.0, final_fraction: Fraction = 0.0
) -> LambdaLR:
    r"""A linear warm-up, then cosine decay (half a period) to ``final_fraction`` of the learning rate.

    After the warm-up, the factor is :math:`f + (1 - f) (1 + \cos \pi p) / 2`, where f = ``final_fraction`` and p, from
    0 to 1, is the completed fraction of the remaining steps.

    Parameters
    ----------
    total_steps : int
        The number of steps of the whole run.
    warmup_fraction : float
        The fraction of the run, between 0 and 1, in which the learning rate rises linearly from 0.
    final_fraction : float
        The final learning rate as a fraction of the optimizer's, between 0 and 1.

    Source: I. Loshchilov and F. Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, equation 5,
    without restarts.
    """
    return _schedule(optimizer, total_steps, warmup_fraction, final_fraction, lambda p: (1 + math.cos(math.pi * p)) / 2)


def _schedule(
    optimizer: Optimizer, num_steps: int, warmup_fraction: float, final_fraction: float, decay: Callable[[float], float]
) -> LambdaLR:
    warmup_steps = round(warmup_fraction * num_steps)

    def factor(step: int) -> float:
        progress = min(1.0, max(0.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)))
        warmup = min(1.0, (step + 1) / (warmup_steps + 1))
        return warmup * (final_fraction + (1 - final_fraction) * decay(progress))

    return LambdaLR(optimizer, factor)

"""Learning-rate schedules over the steps of a run, as multiples of the optimizer's learning rate."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(optimizer: Optimizer, total_steps: int, *, warmup_fraction: float = 0.0) -> LambdaLR:
    """A constant learning rate after a linear warm-up.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer whose learning rate is scheduled.
    total_steps : int
        The number of steps of the whole run.
    warmup_fraction : float
        The fraction of the run, between 0 and 1, in which the learning rate rises linearly from 0.

    Raises
    ------
    ValueError
        ``warmup_fraction`` is out of range.
    """
    warmup_steps = _warmup_steps(total_steps, warmup_fraction)
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def linear(
    optimizer: Optimizer, total_steps: int, *, warmup_fraction: float = 0.0, final_fraction: float = 0.0
) -> LambdaLR:
    """A linear warm-up, then linear decay to ``final_fraction`` of the rate; parameters as for :func:`cosine`."""
    warmup_steps = _warmup_steps(total_steps, warmup_fraction)
    _check_fraction("final_fraction", final_fraction)

    def factor(step: int) -> float:
        return _warmup(step, warmup_steps) * (1 - (1 - final_fraction) * _progress(step, warmup_steps, total_steps))

    return LambdaLR(optimizer, factor)


def cosine(
    optimizer: Optimizer, total_steps: int, *, warmup_fraction: float = 0.0, final_fraction: float = 0.0
) -> LambdaLR:
    r"""A linear warm-up, then cosine decay (half a period) to ``final_fraction`` of the learning rate.

    After the warm-up, the factor is :math:`f + (1 - f) (1 + \cos \pi p) / 2`, where f = ``final_fraction`` and p, from
    0 to 1, is the completed fraction of the remaining steps.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer whose learning rate is scheduled.
    total_steps : int
        The number of steps of the whole run.
    warmup_fraction : float
        The fraction of the run, between 0 and 1, in which the learning rate rises linearly from 0.
    final_fraction : float
        The final learning rate as a fraction of the optimizer's, between 0 and 1.

    Raises
    ------
    ValueError
        A fraction is out of range.

    Source: I. Loshchilov and F. Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, equation 5,
    without restarts.
    """
    warmup_steps = _warmup_steps(total_steps, warmup_fraction)
    _check_fraction("final_fraction", final_fraction)

    def factor(step: int) -> float:
        decay = (1 + math.cos(math.pi * _progress(step, warmup_steps, total_steps))) / 2
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * decay)

    return LambdaLR(optimizer, factor)


def _warmup_steps(total_steps: int, warmup_fraction: float) -> int:
    _check_fraction("warmup_fraction", warmup_fraction)
    return round(warmup_fraction * total_steps)


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    return min(1.0, max(0.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")

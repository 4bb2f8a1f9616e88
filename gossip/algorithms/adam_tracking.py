"""Momentum tracking for Adam, which divides by the second moment of the average gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch.optim import Adam, Optimizer

from gossip.algorithms.base import Resized
from gossip.algorithms.bucket_view import BucketView, PerParameter
from gossip.algorithms.forms import Form
from gossip.algorithms.momentum_tracking import LAST_UPDATE, TRACKER, MomentumTracking
from topologies import Topology

OWN_SQUARES, TRACKED_SQUARES = "own_squares", "tracked_squares"


class AdamTracking(MomentumTracking):
    r"""Momentum tracking with a second moment as all-reduce's Adam has it.

    Adam divides by the root of a mean of squared gradients. A rank's own squares are :math:`\mu_i^2 + \sigma^2`, with
    the mean and the variance of its own gradients; those of the average gradient, :math:`\bar\mu^2 + \sigma^2 / n`, are
    smaller by up to n, and the steps that they allow larger. Here a rank estimates them. With :math:`g_i` its gradient,
    :math:`y_i` the tracker of :class:`gossip.MomentumTracking` in units of the learning rate, :math:`\hat v` a moving
    average that is corrected for its beginning, as Adam does, and :math:`\beta_2` Adam's:

    .. math::
        s_i &\leftarrow \beta_2\, s_i + (1 - \beta_2)\, g_i^2 \\
        p_i &\leftarrow \beta_2\, p_i + (1 - \beta_2)\, \min(y_i^2\, \hat v_i,\ \hat s_i) \\
        v_i &\leftarrow \min(p_i, s_i) + \tfrac{1}{n} \bigl(s_i - \min(p_i, s_i)\bigr)

    :math:`y_i^2\, \hat v_i` is the square of the average first moment, whose noise :math:`\beta_1` has averaged away.
    The :math:`v_i` takes the place of Adam's second moment; all else is momentum tracking.

    Sends two messages per step, and keeps four tensors per bucket. Any doubly stochastic W, also on schedules that
    change. Needs Adam or AdamW, and parameters in float32 or float64. Use it for models that want Adam where ranks hold
    different data, with the form "atc" if the links allow.

    Parameters
    ----------
    form : str
        "awc" or "atc".

    References
    ----------
    This project's own; momentum tracking is that of Takezawa et al., TMLR 2023.
    """

    keeps: ClassVar[Mapping[str, Resized]] = {
        TRACKER: "zero",
        LAST_UPDATE: "zero",
        OWN_SQUARES: "mean",
        TRACKED_SQUARES: "mean",
    }
    directs = True

    def __init__(self, form: Form = "awc") -> None:
        super().__init__(form)
        self._world_size = 1

    def on(self, topology: Topology, delivers: float = 1.0) -> Self:
        del delivers
        bound = type(self)(self.form)
        bound._world_size = topology.world_size
        return bound

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        for optimizer in optimizers:
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            if not isinstance(optimizer, Adam):
                raise ValueError(
                    f"algorithm AdamTracking estimates the second moment of torch.optim.Adam and AdamW, but the "
                    f'optimizer is {name}; choose algorithm="momentum_tracking", which takes any'
                )
            if not all(group["betas"][1] > 0 for group in optimizer.param_groups):
                raise ValueError(
                    "algorithm AdamTracking needs a second moment that remembers: betas[1] must be above 0"
                )
            if any(group["amsgrad"] for group in optimizer.param_groups):
                raise ValueError(
                    "algorithm AdamTracking sets Adam's second moment anew in every step, of which amsgrad=True would "
                    'keep the largest; leave amsgrad out, or choose algorithm="momentum_tracking"'
                )

    def begin(self, bucket: BucketView) -> None:
        if bucket.parameters and bucket.values.dtype.itemsize < torch.float32.itemsize:
            raise ValueError(
                f"algorithm AdamTracking changes Adam's second moment, which is kept in the parameters' "
                f"{bucket.values.dtype}: too coarse for that; keep them in float32, and compute under autocast"
            )
        super().begin(bucket)

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        beta, made = bucket.group_number(lambda group: group["betas"][1]), bucket.updates_made
        own, tracked = bucket.kept[OWN_SQUARES], bucket.kept[TRACKED_SQUARES]
        news = (1 - beta) * gradient.square()
        own.mul_(beta).add_(news)
        before = bucket.optimizer_state("exp_avg_sq")
        moment = (bucket.kept[TRACKER] * bucket.inverse_learning_rate).square_().mul_(before)
        moment = unbiased(moment, beta, made, otherwise=gradient.square())  # in the first step nothing is tracked
        tracked.mul_(beta).add_((1 - beta) * torch.minimum(moment, unbiased(own, beta, made + 1)))
        shared = torch.minimum(tracked, own)
        wanted = shared + (own - shared) / self._world_size
        # To which the optimizer adds the news.
        bucket.add_to_optimizer_state("exp_avg_sq", (wanted - news) / beta - before)
        return gradient


def unbiased(
    average: torch.Tensor, beta: PerParameter, updates: PerParameter, otherwise: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """A moving average that began with zeros, corrected for that; ``otherwise`` where there was no update."""
    weight = torch.as_tensor(1 - beta**updates, dtype=average.dtype, device=average.device)
    return torch.where(weight == 0, otherwise, average / weight)

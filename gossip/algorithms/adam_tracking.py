"""Momentum tracking for Adam, with the second moment of the average gradient."""

from collections.abc import Mapping
from typing import Self

import torch
from torch.optim import Adam, Optimizer

from gossip.algorithms.base import Kept
from gossip.algorithms.bucket_view import BucketView, PerParameter
from gossip.algorithms.momentum_tracking import TRACKER, MomentumTracking
from topologies import Topology

OWN_SQUARES, TRACKED_SQUARES = "own_squares", "tracked_squares"


class AdamTracking(MomentumTracking):
    r"""Momentum tracking with the second moment that Adam would have under all-reduce.

    Adam divides by the root of a moving average of squared gradients. A rank's own squares are :math:`\mu_i^2 +
    \sigma^2`, with the mean and the variance of its own gradients; those of the average gradient, :math:`\bar\mu^2 +
    \sigma^2 / n`, are smaller by a factor of up to n, and so allow larger steps. Here each rank estimates the latter.
    With :math:`g_i` its gradient, :math:`y_i` the tracker of :class:`gossip.MomentumTracking` in units of the learning
    rate, :math:`\hat v` a moving average with Adam's bias correction, and :math:`\beta_2` Adam's:

    .. math::
        s_i &\leftarrow \beta_2\, s_i + (1 - \beta_2)\, g_i^2 \\
        p_i &\leftarrow \beta_2\, p_i + (1 - \beta_2)\, \min(y_i^2\, \hat v_i,\ \hat s_i) \\
        v_i &\leftarrow \min(p_i, s_i) + \tfrac{1}{n} \bigl(s_i - \min(p_i, s_i)\bigr)

    :math:`y_i^2\, \hat v_i` is the square of the average first moment, whose noise :math:`\beta_1` has averaged away.
    :math:`v_i` replaces Adam's second moment; everything else is momentum tracking.

    Sends two messages per step and keeps four tensors per bucket. Works with any doubly stochastic W, including
    schedules that change. Requires Adam or AdamW, and parameters in float32 or float64. Use it for models that need
    Adam where ranks hold different data, with the form "atc" if the links are fast enough.

    Parameters
    ----------
    form : str
        "awc" or "atc", see :class:`gossip.MomentumTracking`.

    References
    ----------
    This project's own; momentum tracking is that of Takezawa et al., TMLR 2023.
    """

    keeps: Mapping[str, Kept] = {
        **MomentumTracking.keeps,
        OWN_SQUARES: Kept("mean", "own"),
        TRACKED_SQUARES: Kept("mean", "own"),
    }
    directs = True
    _world_size = 1

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
                raise ValueError("algorithm AdamTracking needs a second moment with memory: betas[1] must be above 0")
            if any(group["weight_decay"] and not group["decoupled_weight_decay"] for group in optimizer.param_groups):
                raise ValueError(
                    "algorithm AdamTracking replaces Adam's second moment by one of the gradients alone, without the "
                    'weight_decay that Adam adds to them; choose AdamW, or algorithm="momentum_tracking"'
                )
            if any(group["amsgrad"] for group in optimizer.param_groups):
                raise ValueError(
                    "algorithm AdamTracking replaces Adam's second moment in every step, of which amsgrad=True would "
                    'keep the maximum; pass amsgrad=False, or choose algorithm="momentum_tracking"'
                )

    def begin(self, bucket: BucketView) -> None:
        if bucket.parameters and bucket.values.dtype.itemsize < torch.float32.itemsize:
            raise ValueError(
                f"algorithm AdamTracking changes Adam's second moment, which is kept in the parameters' "
                f"{bucket.values.dtype}, which is too coarse; keep the parameters in float32 and compute under autocast"
            )
        super().begin(bucket)

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        beta, made = bucket.group_number(lambda group: group["betas"][1]), bucket.updates_made
        own, tracked = bucket.kept[OWN_SQUARES], bucket.kept[TRACKED_SQUARES]
        news, before = (1 - beta) * gradient.square(), bucket.optimizer_state("exp_avg_sq")
        begins = own == 0  # with an optimizer that has made updates, whose count corrects the bias of both
        for squares in (tracked, own):
            squares.copy_(torch.where(begins, before, squares))
        own.mul_(beta).add_(news)
        moment = (bucket.kept[TRACKER] * bucket.inverse_learning_rate).square_().mul_(before)
        moment = unbiased(moment, beta, made, otherwise=gradient.square())  # in the first step nothing is tracked
        tracked.mul_(beta).add_((1 - beta) * torch.minimum(moment, unbiased(own, beta, made + 1)))
        shared = torch.minimum(tracked, own)
        wanted = shared + (own - shared) / self._world_size
        # The optimizer adds the new term itself.
        bucket.add_to_optimizer_state("exp_avg_sq", (wanted - news) / beta - before)
        return gradient


def unbiased(
    average: torch.Tensor, beta: PerParameter, updates: PerParameter, otherwise: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return a moving average that began at zero, bias-corrected, and ``otherwise`` where there was no update."""
    weight = torch.as_tensor(1 - beta**updates, dtype=average.dtype, device=average.device)
    return torch.where(weight == 0, otherwise, average / weight)

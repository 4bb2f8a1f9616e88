"""The base of algorithms whose own momentum replaces the optimizer's."""

from __future__ import annotations

import torch
from torch.optim import SGD, Optimizer

from gossip.algorithms.base import Algorithm
from gossip.algorithms.bucket_view import BucketView
from topologies.validation import check_real


class OwnMomentum(Algorithm):
    """Algorithms for ``torch.optim.SGD`` without momentum."""

    remembers_before = True
    follows_learning_rate = True
    _constants = ("beta",)

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = check_real("beta", beta, "at least 0 and below 1", example=0.9)

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups):
                raise ValueError(
                    f"algorithm {type(self).__name__} has its own momentum and needs torch.optim.SGD without one, but "
                    f"the optimizer is {type(optimizer).__name__}{' with momentum' * isinstance(optimizer, SGD)}; give "
                    'SGD momentum=0 and the algorithm beta=..., or choose algorithm="integral_correction"'
                )

    def decay_(self, momentum: torch.Tensor, bucket: BucketView) -> None:
        """Multiply by ``beta``, except where the learning rate is 0."""
        is_moving = bucket.is_moving
        momentum.mul_(1 - (1 - self.beta) * is_moving if isinstance(is_moving, torch.Tensor) else self.beta**is_moving)

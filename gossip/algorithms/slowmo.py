"""SlowMo: gossip with a slow momentum over the movement of all ranks between exact averages."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, Kept, add_
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.gossip_pga import GossipPGA
from gossip.algorithms.outer_steps import ANCHOR, VELOCITY, Anchored
from topologies.validation import check_real


class SlowMo(GossipPGA, Anchored):
    r"""Gossip for H steps, then an exact average and a heavy-ball momentum step along the movement since the last one.

    With :math:`a` the values after the last average, :math:`\bar x` the new average, :math:`\eta` the learning rate,
    the slow rate :math:`\alpha` and the slow momentum :math:`\beta`, every H-th exchange is

    .. math::
        v \leftarrow \beta\, v + (a - \bar x) / \eta, \qquad a \leftarrow a - \alpha\, \eta\, v, \qquad x_i \leftarrow a

    With :math:`\alpha = 1` and :math:`\beta = 0` this is Gossip-PGA. The momentum is kept as :math:`\eta\, v`, in units
    of a movement, and follows the learning rate. On a topology in which only every H-th round exchanges anything,
    ``complete.every(H)``, it is local SGD with slow momentum.

    Sends one message per step, and in every H-th step what an all-reduce sends; keeps two tensors per bucket. Works
    with any doubly stochastic W.

    Parameters
    ----------
    period : int
        H, the number of steps from one average to the next, at least 1.
    slow_lr : float
        The slow rate, above 0.
    slow_momentum : float
        The slow momentum, at least 0 and below 1.
    form : str
        "awc" or "atc", as for :class:`gossip.GossipPGA`.

    References
    ----------
    Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving communication-efficient distributed SGD with slow momentum",
    ICLR 2020, algorithm 1.
    """

    keeps: Mapping[str, Kept] = {ANCHOR: Kept("mean", "common"), VELOCITY: Kept("mean", "common")}
    follows_learning_rate = True
    _constants = ("period", "slow_lr", "slow_momentum")

    def __init__(self, period: int = 16, slow_lr: float = 1.0, slow_momentum: float = 0.5, form: Form = "awc") -> None:
        super().__init__(period, form)
        self.slow_lr = check_real("slow_lr", slow_lr, "above 0 and finite", example=0.7)
        self.slow_momentum = check_real("slow_momentum", slow_momentum, "at least 0 and below 1", example=0.9)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        add_(bucket.values, got[VALUES].difference)
        if self._ends_period(bucket.round_index):
            anchor, velocity = bucket.kept[ANCHOR], bucket.kept[VELOCITY]
            velocity.mul_(self.slow_momentum).add_(anchor - bucket.values)
            anchor.sub_(velocity, alpha=self.slow_lr)
            bucket.values.copy_(anchor)

    def updated(self, bucket: BucketView) -> None:
        ratio = bucket.learning_rate_growth
        if isinstance(ratio, torch.Tensor) or ratio != 1:
            bucket.kept[VELOCITY].mul_(ratio)

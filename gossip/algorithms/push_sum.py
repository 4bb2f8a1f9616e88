"""Push-sum (stochastic gradient push): gossip over directed graphs whose matrices are only column-stochastic."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Algorithm, Requires
from gossip.algorithms.bucket_view import Arrived, BucketView

WEIGHT = "weight"


class PushSum(Algorithm):
    r"""Gossip with a scalar weight that corrects the bias of a matrix that is not doubly stochastic.

    The parameters are the ratios :math:`z_i = x_i / w_i`, at which gradients are computed; all weights start at 1. With
    :math:`u_i(t)` the optimizer's update at :math:`z_i`:

    .. math::
        x_i &= \sum_j W_{ij}\, x_j, \qquad w_i = \sum_j W_{ij}\, w_j, \qquad z_i = x_i / w_i \\
        x_i &\leftarrow x_i + u_i(t) \qquad \text{that is, } z_i \leftarrow z_i + u_i(t) / w_i

    The columns of W sum to 1, so :math:`\sum_i x_i` is kept and :math:`\sum_i w_i = n`; the mean over ranks is
    :math:`\sum_i w_i z_i / n`. Each rank alone decides how it divides its values among the ranks that read it; no rank
    needs to know which ranks send to it.

    With ``weighted``, ranks count by their samples. With :math:`n_i(t)` those of rank i in step t
    (:meth:`gossip.GossipDataParallel.weigh`), the weights start at :math:`n_i(0)`, and

    .. math::
        z_i \leftarrow z_i + n_i(t)\, u_i(t) / w_i

    The mean over ranks, :math:`\sum_i w_i z_i / \sum_i w_i`, then moves by :math:`\sum_i n_i(t)\, u_i(t) / \sum_i
    n_i(0)`, as training on the pooled batch does: with gradients that do not depend on the values, it is the same to
    rounding. Any W may be used, such as a doubly stochastic one, with which plain gossip would count all ranks equally.

    Sends one message and one scalar per step and keeps one scalar per bucket. Works with any W whose columns sum to 1;
    with a doubly stochastic one the weights stay 1, and it is adapt while communicating. Compressions whose messages do
    not stand for the values themselves (CHOCO, PowerGossip) cannot be used.

    Parameters
    ----------
    weighted : bool
        Whether ranks count by their samples.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat, "Stochastic gradient push for distributed deep learning", ICML 2019, algorithm 1.
    Kempe, Dobra and Gehrke, "Gossip-based computation of aggregate information", FOCS 2003.
    """

    requires = Requires("column")
    numbers = (WEIGHT,)
    remembers_before = True
    unclipped_because = "divides sums by weights that travel unclipped"
    weighs_by: str = WEIGHT

    def __init__(self, weighted: bool = False) -> None:
        self._weigh(weighted, "samples")

    def begin(self, bucket: BucketView) -> None:
        super().begin(bucket)
        if self.weighted:
            bucket.numbers[self.weighs_by].mul_(bucket.samples)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        weight = bucket.numbers[self.weighs_by]
        total = bucket.values * weight + got[VALUES].difference
        weight.add_(got[self.weighs_by].difference)
        bucket.values.copy_(total.div_(weight))

    def updated(self, bucket: BucketView) -> None:
        factor = bucket.samples if self.weighted else 1.0
        bucket.values.copy_(bucket.before + (bucket.values - bucket.before) * factor / bucket.numbers[self.weighs_by])

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {VALUES: (bucket.values * bucket.numbers[self.weighs_by]).to(bucket.values.dtype)}

"""DecentLaM: one momentum for gradient and exchange, for static undirected topologies."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Kept, OwnMomentum, Requires
from gossip.algorithms.bucket_view import Arrived, BucketView, scaled

MOMENTUM, UPDATE = "momentum", "update"


class DecentLaM(OwnMomentum):
    r"""Momentum applied to the whole movement of a momentum-free step, exchange included.

    Local momentum increases the bias of gossip by a factor of :math:`1 / (1 - \beta)`; this one leaves it as it is
    without momentum. With :math:`g_i` the clipped gradient, and SGD without momentum:

    .. math::
        z_i &= \sum_j W_{ij} \bigl(x_j - \eta\, g_j\bigr), \qquad \tilde g_i = (x_i - z_i) / \eta \\
        m_i &\leftarrow \beta\, m_i + \tilde g_i, \qquad x_i \leftarrow x_i - \eta\, m_i

    The exchange is awaited before the next forward pass. A step without an exchange has :math:`z_i = x_i - \eta g_i`.

    Sends one message per step and keeps two tensors per bucket. W must be static and symmetric: on a schedule that
    changes from round to round it diverges. The optimizer must be ``torch.optim.SGD`` with ``momentum=0``. Use it with
    large batches on a static undirected topology.

    Parameters
    ----------
    beta : float
        The momentum, at least 0 and below 1.

    References
    ----------
    Yuan, Chen, Huang, Zhang, Pan, Xu and Yin, "DecentLaM: Decentralized momentum SGD for large-batch deep training",
    ICCV 2021, algorithm 2.
    """

    requires = Requires(static=True, symmetric=True, prompt=True)
    keeps: Mapping[str, Kept] = {MOMENTUM: Kept("mean", "own"), UPDATE: Kept("zero", "own")}
    before_forward = True

    def updated(self, bucket: BucketView) -> None:
        bucket.kept[UPDATE].copy_(bucket.values - bucket.before)
        if not bucket.exchanges:
            self._apply(bucket, bucket.kept[UPDATE])

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        self._apply(bucket, bucket.kept[UPDATE] + got[VALUES].difference)

    def _apply(self, bucket: BucketView, movement: torch.Tensor) -> None:
        """Replace the update by the momentum of a momentum-free step's movement."""
        momentum = bucket.kept[MOMENTUM]
        self.decay_(momentum, bucket)
        momentum.sub_(scaled(movement, bucket.inverse_learning_rate))
        bucket.values.sub_((bucket.kept[UPDATE] + scaled(momentum, bucket.learning_rate)).to(bucket.values.dtype))

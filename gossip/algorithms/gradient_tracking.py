"""Gradient tracking: every rank steps along an estimate of the average gradient."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Kept, WithForm
from gossip.algorithms.bucket_view import BucketView

TRACKER, LAST_GRADIENT = "tracker", "last_gradient"


class GradientTracking(WithForm):
    r"""Replace the gradient by a tracker of the average gradient before it reaches the optimizer (DIGing).

    With :math:`g_i(t)` rank i's clipped gradient and :math:`u_i(y)` the optimizer's update from y:

    .. math::
        y_i &\leftarrow \sum_j W_{ij}\, y_j + g_i(t) - g_i(t-1), \qquad y_i(0) = g_i(0) \\
        x_i &\leftarrow \sum_j W_{ij}\, x_j + u_i(y_i)

    :math:`\sum_i y_i = \sum_i g_i` in every step, so where the replicas agree each y is the average gradient. This is
    the form "awc" (adapt while communicating): both messages have the whole next iteration to arrive. The form "atc"
    (adapt then combine) awaits them before the next forward pass, :math:`x_i \leftarrow \sum_j W_{ij} \bigl(x_j +
    u_j(y_j)\bigr)`, and is stable at larger learning rates.

    Sends two messages per step, values and tracker, and keeps two tensors per bucket. Works with any doubly stochastic
    W, including schedules that change, if the learning rate is small enough: at large ones it diverges where gossip
    does not. Use it where ranks hold different data and gradients have little noise. After a change of world size the
    tracker starts anew.

    Parameters
    ----------
    form : str
        When the messages are awaited, "awc" or "atc".

    References
    ----------
    Nedic, Olshevsky and Shi, "Achieving geometric convergence for distributed optimization over time-varying graphs",
    SIAM Journal on Optimization 27 (4), 2017, algorithm 1.
    """

    sends = (VALUES, TRACKER)
    keeps: Mapping[str, Kept] = {TRACKER: Kept("zero"), LAST_GRADIENT: Kept("zero")}
    directs = True

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        bucket.kept[TRACKER].add_(gradient).sub_(bucket.kept[LAST_GRADIENT])
        bucket.kept[LAST_GRADIENT].copy_(gradient)
        return bucket.kept[TRACKER].clone()

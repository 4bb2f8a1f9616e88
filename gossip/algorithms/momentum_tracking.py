"""Momentum tracking: every rank steps along an estimate of the average update."""

from collections.abc import Mapping

from gossip.algorithms.base import VALUES, Kept, WithForm, add_
from gossip.algorithms.bucket_view import Arrived, BucketView, scaled

TRACKER, LAST_UPDATE = "tracker", "last_update"


class MomentumTracking(WithForm):
    r"""Gradient tracking applied to the optimizer's updates, momentum included, instead of the gradients.

    With :math:`u_i(t)` the optimizer's update from rank i's own gradient:

    .. math::
        y_i &\leftarrow \sum_j W_{ij}\, y_j + u_i(t) - u_i(t-1), \qquad y_i(0) = u_i(0) \\
        x_i &\leftarrow \sum_j W_{ij}\, x_j + y_i

    :math:`\sum_i y_i = \sum_i u_i` in every step. The tracker and the last update are in units of an update: they
    follow the learning rate, and a step whose rate is 0 does not apply them, nor is what it sends mixed; with "awc"
    what the step before it has sent still is. The form "atc" awaits both messages before the next forward pass:
    :math:`x_i \leftarrow \sum_j W_{ij} (x_j + y_j)`.

    Sends two messages per step and keeps two tensors per bucket. Works with any doubly stochastic W, including
    schedules that change. Use it where ranks hold different data, if two messages per step are affordable.

    Parameters
    ----------
    form : str
        When the messages are awaited, "awc" or "atc".

    References
    ----------
    Takezawa, Bao, Niwa, Sato and Yamada, "Momentum tracking: Momentum acceleration for decentralized deep learning on
    heterogeneous data", TMLR 2023, algorithm 1.
    """

    sends = (VALUES, TRACKER)
    keeps: Mapping[str, Kept] = {TRACKER: Kept("zero"), LAST_UPDATE: Kept("zero")}
    remembers_before = True
    follows_learning_rate = True

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        bucket.kept[TRACKER].add_(scaled(got[TRACKER].difference, bucket.is_moving))
        add_(bucket.values, scaled(got[VALUES].difference, bucket.is_moving))

    def updated(self, bucket: BucketView) -> None:
        tracker, last = (bucket.kept[name].mul_(bucket.learning_rate_ratio) for name in (TRACKER, LAST_UPDATE))
        news = scaled((bucket.values - bucket.before).to(last.dtype) - last, bucket.is_moving)
        tracker.add_(news)
        last.add_(news)
        bucket.values.copy_(bucket.before + scaled(tracker, bucket.is_moving))

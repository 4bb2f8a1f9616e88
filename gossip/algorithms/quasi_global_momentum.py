"""Quasi-global momentum: the momentum of a replica's actual movement, including its peers' pull."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, Kept, OwnMomentum, WithForm, add_
from gossip.algorithms.bucket_view import Arrived, BucketView, scaled

MOMENTUM, PULL = "momentum", "pull"


class WithQuasiGlobalMomentum(WithForm, OwnMomentum):
    r"""The momentum :math:`m_i \leftarrow \beta\, m_i + (1 - \beta) \bigl(x_i(t) - x_i(t+1)\bigr) / \eta(t)`.

    :math:`x_i(t)` is what the forward pass of step t reads. The movement consists of what updates and exchanges add to
    the values; edits of the values between steps do not count. A step whose learning rate is 0 leaves the momentum as
    it is.
    """

    keeps: Mapping[str, Kept] = {MOMENTUM: Kept("mean", "own"), PULL: Kept("zero", "own")}
    directs = True

    def __init__(self, beta: float = 0.9, form: Form = "awc") -> None:
        OwnMomentum.__init__(self, beta)
        WithForm.__init__(self, form)

    def remember_pull(self, bucket: BucketView, difference: torch.Tensor, factor: float = 1.0) -> None:
        """Record what an exchange adds to the values: for "awc" in the current step, for "atc" in the last one."""
        if self.form == "awc":
            bucket.kept[PULL].add_(difference, alpha=factor)
        else:
            _move(bucket, difference, -factor * (1 - self.beta))

    def remember_update(self, bucket: BucketView) -> None:
        """Record what a step has added to the values since their exchange was combined."""
        momentum, pull = bucket.kept[MOMENTUM], bucket.kept[PULL]
        self.decay_(momentum, bucket)
        _move(bucket, (bucket.values - bucket.before).to(pull.dtype) + pull, -(1 - self.beta))
        pull.zero_()


class QuasiGlobalMomentum(WithQuasiGlobalMomentum):
    r"""Gossip in which each rank uses the momentum of its own trajectory, mixing included.

    Local momentum carries a rank's own data along, whereas the trajectory of a replica is close to that of the average.
    With :math:`g_i` the clipped gradient, and SGD without momentum:

    .. math::
        x_i(t+1) &= \sum_j W_{ij}\, x_j(t) - \eta \bigl(g_i + \beta\, m_i\bigr) \\
        m_i &\leftarrow \beta\, m_i + (1 - \beta) \bigl(x_i(t) - x_i(t+1)\bigr) / \eta

    The form "atc": :math:`x_i(t+1) = \sum_j W_{ij} \bigl(x_j(t) - \eta\, (g_j + \beta\, m_j)\bigr)`.

    Sends one message per step and keeps two tensors per bucket. Works with any doubly stochastic W. It replaces the
    optimizer's momentum: the optimizer must be ``torch.optim.SGD`` with ``momentum=0``.

    Parameters
    ----------
    beta : float
        The momentum, at least 0 and below 1.
    form : str
        When an exchange is awaited, "awc" or "atc".

    References
    ----------
    Lin, Karimireddy, Stich and Jaggi, "Quasi-global momentum: Accelerating decentralized deep learning on heterogeneous
    data", ICML 2021, algorithm 1.
    """

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        pull = scaled(got[VALUES].difference, bucket.is_moving)
        self.remember_pull(bucket, pull)
        add_(bucket.values, pull)

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.add_(bucket.kept[MOMENTUM], alpha=self.beta)

    updated = WithQuasiGlobalMomentum.remember_update


def _move(bucket: BucketView, movement: torch.Tensor, factor: float) -> None:
    bucket.kept[MOMENTUM].add_(scaled(movement, bucket.inverse_learning_rate), alpha=factor)

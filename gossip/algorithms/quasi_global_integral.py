"""Quasi-global momentum with an integral correction: replicas nearly as good as their average."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, Kept
from gossip.algorithms.bucket_view import Arrived, BucketView, scaled
from gossip.algorithms.integral_correction import IntegralCorrection
from gossip.algorithms.quasi_global_momentum import MOMENTUM, WithQuasiGlobalMomentum


class QuasiGlobalIntegral(IntegralCorrection, WithQuasiGlobalMomentum):
    r"""Momentum of a replica's own trajectory, and a separate correction that the momentum does not amplify.

    With :math:`g_i` the clipped gradient, SGD without momentum, :math:`d_i` what an exchange adds, and the gains
    :math:`\gamma` and :math:`\kappa` of :class:`IntegralCorrection`:

    .. math::
        x_i &\leftarrow x_i + \gamma\, d_i, \qquad c_i \leftarrow c_i + \kappa\, d_i \qquad \text{on arrival} \\
        x_i &\leftarrow x_i - \eta \bigl(g_i + \beta\, (g_i + \beta\, m_i)\bigr) + c_i \\
        m_i &\leftarrow \beta\, m_i + (1 - \beta) \bigl(x_i(t) - x_i(t+1)\bigr) / \eta

    This is Nesterov's form of quasi-global momentum; :math:`c_i` follows the learning rate. The gains derived from the
    number of steps to mix are used on static symmetric topologies too, because with the textbook's it diverges.

    Sends one message per step and keeps three tensors per bucket. Works with any doubly stochastic W. The optimizer
    must be ``torch.optim.SGD`` with ``momentum=0``.

    Parameters
    ----------
    beta : float
        The momentum, at least 0 and below 1.
    form : str
        When an exchange is awaited, "awc" or "atc".
    gamma, kappa : float, optional
        The gains, see :class:`IntegralCorrection`.

    References
    ----------
    This project's own; :class:`QuasiGlobalMomentum` and :class:`IntegralCorrection` have their sources.
    """

    _takes_textbook_gains = False
    keeps: Mapping[str, Kept] = {**WithQuasiGlobalMomentum.keeps, **IntegralCorrection.keeps}

    def __init__(
        self, beta: float = 0.9, form: Form = "awc", gamma: float | None = None, kappa: float | None = None
    ) -> None:
        IntegralCorrection.__init__(self, form, gamma, kappa)
        WithQuasiGlobalMomentum.__init__(self, beta, form)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        gamma, _ = self.gains(bucket.round_index)
        self.remember_pull(bucket, scaled(got[VALUES].difference, bucket.is_moving), gamma)
        super().arrive(bucket, got)

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(1 + self.beta).add_(bucket.kept[MOMENTUM], alpha=self.beta**2)

    def updated(self, bucket: BucketView) -> None:
        super().updated(bucket)
        self.remember_update(bucket)

    def describe(self) -> str:
        return f"{super().describe()} beta={self.beta:g}"

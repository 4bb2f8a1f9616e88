"""EXTRA: gossip with an integral correction, for static undirected topologies."""

from __future__ import annotations

from gossip.algorithms.base import Requires
from gossip.algorithms.integral_correction import IntegralCorrection


class Extra(IntegralCorrection):
    r"""EXTRA: gossip with an integral correction, for static undirected topologies.

    :class:`IntegralCorrection` in the form "awc" with both gains 1/2. With plain SGD and :math:`\bar W = (I + W) / 2`

    .. math:: x(t+2) = x(t+1) + W x(t+1) - \bar W x(t) - \eta\, \bigl(g(t+1) - g(t)\bigr)

    Sends one message per step and keeps one tensor per bucket. W must be static and symmetric: on a schedule that
    changes from round to round it diverges.

    References
    ----------
    Shi, Ling, Wu and Yin, "EXTRA: An exact first-order algorithm for decentralized consensus optimization", SIAM
    Journal on Optimization 25 (2), 2015, recursion (2.13).
    """

    requires = Requires(static=True, symmetric=True, prompt=True)

    def __init__(self) -> None:
        super().__init__("awc")

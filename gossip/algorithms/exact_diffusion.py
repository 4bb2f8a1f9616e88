"""Exact diffusion (D2): diffusion without the bias that heterogeneous data cause."""

from __future__ import annotations

from gossip.algorithms.base import Requires
from gossip.algorithms.integral_correction import IntegralCorrection


class ExactDiffusion(IntegralCorrection):
    r"""Diffusion with an integral correction, whose fixed point is the optimum itself.

    :class:`IntegralCorrection` in the form "atc" with both gains 1/2 (with an exchange every k steps, :math:`\kappa` is
    divided by k). With :math:`u_i(t)` the optimizer's update, :math:`d_i = \sum_j W_{ij} m_j - m_i` what an exchange
    adds, and :math:`\eta(t)` the learning rate, a step is

    .. math::
        c_i &\leftarrow \frac{\eta(t)}{\eta(t-1)}\, c_i, \qquad x_i \leftarrow x_i + u_i(t) + c_i
            \qquad \text{then } x_i \text{ is sent} \\
        c_i &\leftarrow c_i + \tfrac{1}{2} d_i, \qquad x_i \leftarrow x_i + \tfrac{1}{2} d_i
            \qquad \text{before the next forward pass}

    With plain SGD this is :math:`\psi_i = x_i - \eta g_i`, :math:`\phi_i = \psi_i + x_i - \psi_i(t-1)`,
    :math:`x_i = \sum_j \bar W_{ij} \phi_j` with :math:`\bar W = (I + W) / 2`. :math:`\sum_i c_i = 0`: the average
    follows the average of the updates.

    Sends one message per step and keeps one tensor per bucket. W must be static and symmetric: on a schedule that
    changes from round to round it diverges. Use it where ranks hold different data on a static undirected topology.

    References
    ----------
    Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and learning, part I", IEEE Transactions
    on Signal Processing 67 (3), 2019, algorithm 1. Tang et al., "D2: Decentralized training over decentralized data",
    ICML 2018.
    """

    requires = Requires(static=True, symmetric=True, prompt=True)

    def __init__(self) -> None:
        super().__init__("atc")

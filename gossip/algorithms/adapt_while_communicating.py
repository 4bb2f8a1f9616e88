"""Adapt while communicating (AWC, D-PSGD): the exchange overlaps the next iteration."""

from __future__ import annotations

from gossip.algorithms.mixing_factor import WithMixingFactor


class AdaptWhileCommunicating(WithMixingFactor):
    r"""The local update and the exchange run concurrently: AWC, or D-PSGD.

    With :math:`u_i(t)` the optimizer's update at rank i, computed from the gradient at :math:`x_i(t)`, and
    :math:`W_t` the mixing matrix of round t:

    .. math::
        x_i(1) &= x_i(0) + u_i(0) \\
        x_i(t+1) &= \sum_j W_{t-1}[i,j]\, x_j(t) + u_i(t), \qquad t \ge 1

    Round t is the exchange of x(t+1): it is sent in the backward pass of step t and needed only where the same
    parameters are updated in the backward pass of step t+1, so it has one whole iteration to arrive.

    References
    ----------
    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, algorithm 1.
    """

    before_forward = False

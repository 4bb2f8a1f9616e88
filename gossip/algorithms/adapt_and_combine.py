"""Gossip itself, with a mixing factor: adapt while communicating (AWC), and adapt then combine (ATC)."""

from collections.abc import Callable

import torch

from gossip.algorithms.base import Algorithm, add_
from topologies.validation import check_real

MixingFactor = float | Callable[[int], float]


class WithMixingFactor(Algorithm):
    r"""Combination by :math:`x_i \leftarrow x_i + \gamma \bigl(\sum_j W[i,j]\, m_j - m_i\bigr)`.

    Parameters
    ----------
    gamma : float or callable
        The mixing factor in x <- (1 - gamma) x + gamma mix(x), from 0 to 1, or a function of the round's index,
        ``gamma(t) -> float``. The attribute may be set between steps. It must be the same on every rank, or the mean
        over ranks is not kept.
    """

    def __init__(self, gamma: MixingFactor = 1.0) -> None:
        if not callable(gamma):
            check_real("gamma", gamma, "between 0 and 1", example=0.5)
        self.gamma = gamma

    def combine_(self, values: torch.Tensor, difference: torch.Tensor, round_index: int) -> None:
        gamma = self.gamma(round_index) if callable(self.gamma) else self.gamma
        add_(values, difference, check_real("gamma", gamma, "between 0 and 1", example=0.5))

    def follow(self, before: Algorithm) -> None:
        assert isinstance(before, WithMixingFactor)
        self.gamma = before.gamma

    def describe(self) -> str:
        gamma = "a schedule" if callable(self.gamma) else f"{self.gamma:g}"
        return f"{type(self).__name__}(gamma={gamma})"


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


class AdaptThenCombine(WithMixingFactor):
    r"""Update first, then average the updated values before they are used again: ATC, or diffusion.

    .. math:: x_i(t+1) = \sum_j W_t[i,j]\, \bigl(x_j(t) + u_j(t)\bigr)

    Round t is sent in the backward pass of step t and awaited in the next forward pass, where each bucket is awaited
    only by the first module that reads it. With W = J/n and plain SGD this is all-reduce of the gradients, step by
    step.

    References
    ----------
    Chen and Sayed, "Diffusion adaptation strategies for distributed optimization and learning over networks", IEEE
    Transactions on Signal Processing 60 (8), 2012, equation (20).
    """

    before_forward = True

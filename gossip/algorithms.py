"""Update rules: when a rank combines its values with what it got, and how."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch

MixingFactor = float | Callable[[int], float]


class Algorithm:
    r"""How updates and exchanges follow each other. The base holds what all of them share.

    A message is a rank's flat values as they were sent, :math:`m_i`. When the messages of a round have arrived, they
    are combined into the values as they are then:

    .. math:: x_i \mathrel{+}= \gamma \Bigl(\sum_j W[i,j]\, m_j - m_i\Bigr)

    With :math:`\gamma = 1` and values that were not edited since the message left this is
    :math:`x_i \leftarrow \sum_j W[i,j]\, x_j`. In this form the mean over ranks is kept whatever the messages lost on
    the way, and an edit of the values in between (``load_state_dict``, a clamp) survives.

    Parameters
    ----------
    gamma : float or callable
        The mixing factor: x <- (1 - gamma) x + gamma mix(x), between 0 and 1; or a function of the round's index,
        ``gamma(t) -> float``. The attribute may be set between steps. It must be the same on every rank: else the mean
        over ranks is not kept.

    Attributes
    ----------
    combines_before_forward : bool
        Whether the messages of a step must be combined before the next forward pass reads the parameters; else they
        are when the same parameters are updated next.

    Raises
    ------
    ValueError
        ``gamma`` is not between 0 and 1.
    """

    combines_before_forward: ClassVar[bool]

    def __init__(self, gamma: MixingFactor = 1.0) -> None:
        if not callable(gamma):
            _check_gamma(gamma)
        self.gamma = gamma

    def combine_(self, values: torch.Tensor, difference: torch.Tensor, round_index: int) -> None:
        r"""Mix what arrived into ``values``, in place.

        Parameters
        ----------
        values : Tensor, [..., numel]
            The flat parameters x_i; changed in place. Leading dimensions are workers.
        difference : Tensor, [..., numel]
            :math:`\sum_j W[i,j] m_j - m_i`, in the dtype of accumulation; used up as scratch.
        round_index : int
            Index of the round in which the messages were sent.
        """
        gamma = self.gamma(round_index) if callable(self.gamma) else self.gamma
        _check_gamma(gamma)
        if values.dtype == difference.dtype:
            values.add_(difference, alpha=gamma)
        else:
            values.copy_(difference.mul_(gamma).add_(values))

    def describe(self) -> str:
        """Name and constants, to be compared between ranks."""
        gamma = "a schedule" if callable(self.gamma) else f"{self.gamma:g}"
        return f"{type(self).__name__}(gamma={gamma})"


class AdaptWhileCommunicating(Algorithm):
    r"""The local update and the exchange run side by side (D-PSGD).

    With :math:`u_i(t)` the optimizer's update at rank i, computed from the gradient at :math:`x_i(t)`, and
    :math:`W_t` the mixing matrix of round t:

    .. math::
        x_i(1) &= x_i(0) + u_i(0) \\
        x_i(t+1) &= \sum_j W_{t-1}[i,j]\, x_j(t) + u_i(t), \qquad t \ge 1

    Round t is the exchange of x(t+1): it leaves in the backward pass of step t and is needed only where the same
    parameters are updated in the backward pass of step t+1, so that it has one whole iteration to arrive in.

    References
    ----------
    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, algorithm 1.
    """

    combines_before_forward = False


class AdaptThenCombine(Algorithm):
    r"""Update first, then average what was updated, before it is used again (diffusion).

    .. math:: x_i(t+1) = \sum_j W_t[i,j]\, \bigl(x_j(t) + u_j(t)\bigr)

    Round t leaves in the backward pass of step t and is awaited in the next forward pass, each bucket only where the
    first module runs that reads it. With W = J/n and plain SGD this is all-reduce of the gradients, step by step.

    References
    ----------
    Chen and Sayed, "Diffusion adaptation strategies for distributed optimization and learning over networks", IEEE
    Transactions on Signal Processing 60 (8), 2012, equation (20).
    """

    combines_before_forward = True


_BY_NAME: dict[str, type[Algorithm]] = {
    "adapt_while_communicating": AdaptWhileCommunicating,
    "adapt_then_combine": AdaptThenCombine,
}


def resolve_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm itself, or one with the default constants by its name.

    Raises
    ------
    ValueError, TypeError
        There is none of that name; neither a name nor an algorithm.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name or a gossip.Algorithm, got {algorithm!r}; pass e.g. AdaptThenCombine()"
        )
    if algorithm not in _BY_NAME:
        raise ValueError(f"there is no algorithm {algorithm!r}; choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[algorithm]()


def _check_gamma(gamma: float) -> None:
    if not isinstance(gamma, int | float) or not math.isfinite(gamma) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be between 0 and 1, or a function of the round's index, got {gamma!r}")

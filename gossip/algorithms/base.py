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


def _check_gamma(gamma: float) -> None:
    if not isinstance(gamma, int | float) or not math.isfinite(gamma) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be between 0 and 1, or a function of the round's index, got {gamma!r}")

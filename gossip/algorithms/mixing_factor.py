"""Gossip with a mixing factor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gossip.algorithms.base import Algorithm, add_

MixingFactor = float | Callable[[int], float]


class WithMixingFactor(Algorithm):
    r"""Combination by :math:`x_i \leftarrow x_i + \gamma \bigl(\sum_j W[i,j]\, m_j - m_i\bigr)`.

    Parameters
    ----------
    gamma : float or callable
        The mixing factor in x <- (1 - gamma) x + gamma mix(x), from 0 to 1, or a function of the round's index,
        ``gamma(t) -> float``. The attribute may be set between steps. It must be the same on every rank, or the mean
        over ranks is not kept.

    Raises
    ------
    ValueError
        ``gamma`` is not from 0 to 1.
    """

    def __init__(self, gamma: MixingFactor = 1.0) -> None:
        if not callable(gamma):
            _check_gamma(gamma)
        self.gamma = gamma

    def combine_(self, values: torch.Tensor, difference: torch.Tensor, round_index: int) -> None:
        gamma = self.gamma(round_index) if callable(self.gamma) else self.gamma
        _check_gamma(gamma)
        add_(values, difference, gamma)

    def follow(self, before: Algorithm) -> None:
        assert isinstance(before, WithMixingFactor)
        self.gamma = before.gamma

    def describe(self) -> str:
        gamma = "a schedule" if callable(self.gamma) else f"{self.gamma:g}"
        return f"{type(self).__name__}(gamma={gamma})"


def _check_gamma(gamma: float) -> None:
    if not isinstance(gamma, int | float) or not math.isfinite(gamma) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be between 0 and 1, or a function of the round's index, got {gamma!r}")

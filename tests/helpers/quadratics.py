"""What algorithms are tried on: quadratics of several ranks, an optimizer and learning rates, in plain numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np

NUM_VALUES = 7
BUCKETS = slice(4, 7), slice(0, 4)
"""Of the values in two parameters, each of which fills a bucket: the last one is exchanged first."""
LEARNING_RATE = 0.05
MOMENTUM = 0.9

Array = np.ndarray[Any, np.dtype[np.float64]]


class Problem:
    """Rank i has f_i(x) = 0.5 |A_i x - b_i|^2; in some steps some ranks' gradients are not finite, and are skipped."""

    def __init__(self, world_size: int, num_steps: int, skipped: tuple[tuple[int, int], ...] = ()) -> None:
        random = np.random.default_rng(0)
        self.world_size, self.num_steps = world_size, num_steps
        self.start = random.normal(size=NUM_VALUES)
        self.matrices = random.normal(size=(world_size, NUM_VALUES, NUM_VALUES)) / 3
        self.targets = random.normal(size=(world_size, NUM_VALUES))
        self.skipped = skipped

    def gradients(self, x: Array, max_norm: float | None = None) -> Array:
        """Of each rank at its own x, [n, d], clipped."""
        residuals = np.einsum("nij,nj->ni", self.matrices, x) - self.targets
        gradients = np.einsum("nij,ni->nj", self.matrices, residuals)
        if max_norm is None:
            return gradients
        return gradients * np.minimum(1, max_norm / (np.linalg.norm(gradients, axis=1, keepdims=True) + 1e-6))

    def samples(self, step: int) -> Array:
        """How many each rank has in a step, [n], float64."""
        return 1.0 + (3 * np.arange(self.world_size) + 2 * step) % 5

    def is_updated(self, step: int) -> Array:
        """Which ranks are, [n, 1]."""
        updated = np.ones((self.world_size, 1), dtype=bool)
        for rank, skipped in self.skipped:
            updated[rank] &= skipped != step
        return updated


class Sgd:
    """torch.optim.SGD, of all ranks."""

    def __init__(self, rates: Callable[[int], float], momentum: float | None) -> None:
        self.rates, self.momentum = rates, momentum or 0.0
        self.velocity: Array | float = 0.0

    def __call__(self, gradients: Array, updated: Array, step: int) -> Array:
        self.velocity = np.where(updated, self.momentum * self.velocity + gradients, self.velocity)
        return np.where(updated, -self.rates(step) * self.velocity, 0)


def constant(_: int) -> float:
    return LEARNING_RATE


def halved_at_four(step: int) -> float:
    return LEARNING_RATE if step < 4 else LEARNING_RATE / 2

"""Rounds that a user's function computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from topologies.round import Round


class Seeded:
    """Calls ``function(t, generator)`` with a generator that depends on (seed, t) alone."""

    def __init__(self, function: Callable[..., Round], seed: int) -> None:
        self.function = function
        self.seed = seed

    def __call__(self, t: int) -> Round:
        return self.function(t, np.random.default_rng((self.seed, t)))


def check_is_round(value: object, number: int) -> None:
    """Refuse what is no round."""
    if not isinstance(value, Round):
        raise TypeError(
            f"function must return a Round, got {type(value).__name__} for round {number}; wrap a matrix in "
            f"Round.from_matrix"
        )

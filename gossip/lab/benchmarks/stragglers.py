"""Artificial delays of ranks, which are the same for every method of a run."""

from __future__ import annotations

import numpy as np

MEAN_S = 0.05
SLOW_RANK = 0
KINDS = {
    "none": "no delays",
    "exponential": "exponentially distributed delays with a mean of 50 ms on every rank and step",
    "one_slow": "rank 0 takes twice the time of its computation",
    "half_speed": "50 ms on every rank and step, but 100 ms on rank 0, as if devices computed meanwhile",
}


def delay_s(kind: str, *, seed: int, repetition: int, rank: int, step: int, compute_s: float) -> float:
    """Return how long a rank sleeps before a step, in seconds, by a key of :data:`KINDS`.

    ``compute_s`` is the time of a step without communication; the others determine a random delay.
    """
    if kind == "exponential":
        return float(np.random.default_rng([seed, repetition, rank, step]).exponential(MEAN_S))
    if kind == "half_speed":
        return MEAN_S * (2 if rank == SLOW_RANK else 1)
    return compute_s if kind == "one_slow" and rank == SLOW_RANK else 0.0

"""Delays that make ranks late, the same for every method of a run."""

from __future__ import annotations

import numpy as np

KINDS = ("none", "exponential", "one_slow", "half_speed")
MEAN_S = 0.05
SLOW_RANK = 0


def delay_s(kind: str, *, seed: int, repetition: int, rank: int, step: int, compute_s: float) -> float:
    """How long a rank sleeps before a step.

    Parameters
    ----------
    kind : str
        "none"; "exponential": on every rank and step, of mean 50 ms; "one_slow": rank 0 takes twice as long as it
        computes; "half_speed": 50 ms on every rank and step, but 100 ms on rank 0, as if devices computed meanwhile.
    seed, repetition, rank, step : int
        What is drawn depends on these alone.
    compute_s : float
        How long a step without communication takes.

    Raises
    ------
    ValueError
        ``kind`` is none of these.
    """
    if kind == "none":
        return 0.0
    if kind == "exponential":
        return float(np.random.default_rng([seed, repetition, rank, step]).exponential(MEAN_S))
    if kind == "half_speed":
        return MEAN_S * (2 if rank == SLOW_RANK else 1)
    if kind == "one_slow":
        return compute_s if rank == SLOW_RANK else 0.0
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")

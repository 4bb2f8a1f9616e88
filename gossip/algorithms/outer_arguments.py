"""What algorithms with a period and an outer optimizer may be given."""

from __future__ import annotations

import math


def check_period(name: str, value: int) -> int:
    """A number of steps, at least 1.

    Raises
    ------
    ValueError
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def check_rate(name: str, value: float) -> float:
    """Above 0 and finite.

    Raises
    ------
    ValueError
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return value


def check_fraction(name: str, value: float) -> float:
    """From 0, below 1.

    Raises
    ------
    ValueError
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number from 0 and below 1, got {value!r}")
    return value

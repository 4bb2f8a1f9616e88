"""Checks of the arguments of algorithms with a period and an outer optimizer."""

from __future__ import annotations

import math


def check_period(name: str, value: int) -> int:
    """Return ``value`` if it is a number of steps of at least 1.

    Raises
    ------
    ValueError
        It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def check_rate(name: str, value: float) -> float:
    """Return ``value`` if it is above 0 and finite.

    Raises
    ------
    ValueError
        It is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return value


def check_fraction(name: str, value: float) -> float:
    """Return ``value`` if it is at least 0 and below 1.

    Raises
    ------
    ValueError
        It is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number of at least 0 and below 1, got {value!r}")
    return value

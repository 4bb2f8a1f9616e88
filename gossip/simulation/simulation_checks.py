"""Refusal of numbers that do not describe a cluster or a workload."""

from __future__ import annotations

import math
import numbers


def check_amount(argument: str, value: object, *, positive: bool = False, finite: bool = True) -> float:
    """Return ``value`` as a float that is at least 0, or positive.

    Raises
    ------
    TypeError
        It is not a number.
    ValueError
        It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{argument} must be a number, got {value!r} ({type(value).__name__}); pass for example 1.0")
    number = float(value)
    in_range = number > 0 if positive else number >= 0
    if not in_range or (finite and number == math.inf):
        allowed = "positive" if positive else "at least 0"
        raise ValueError(f"{argument} must be {allowed}{' and finite' * finite}, got {value!r}; correct it")
    return number

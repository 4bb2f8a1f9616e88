"""Checks of what a user gives, and the errors that say what would be accepted instead."""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from topologies.round import Round

Stochasticity = Literal["doubly", "row", "column"]

#: Largest deviation of a row or column sum from 1 that is put down to rounding. The mean over ranks then drifts
#: by less than 1e-4 of its size in a million rounds.
SUM_TOLERANCE = 1e-10


def check_integer(argument: str, value: object, *, minimum: int) -> int:
    """Return ``value`` as an ``int`` of at least ``minimum``.

    Raises
    ------
    TypeError
        If it is not an integer (a ``bool`` or a ``float`` is not one).
    ValueError
        If it is smaller than ``minimum``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer of at least {minimum}, got {value!r} ({type(value).__name__}); "
            f"pass a plain int"
        ) from None
    if number < minimum:
        raise ValueError(f"{argument} must be at least {minimum}, got {number}; pass {minimum} or more")
    return number


def check_share(argument: str, value: object) -> float:
    """Return ``value`` as a float between 0 and 1, both excluded."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{argument} must be a number, got {value!r} ({type(value).__name__}); pass for example 0.01")
    number = float(value)
    if not 0.0 < number < 1.0:
        raise ValueError(f"{argument} must be between 0 and 1, got {value!r}; pass for example 0.01")
    return number


def check_world_size(world_size: object) -> int:
    """Return ``world_size`` as an ``int`` of at least 1."""
    return check_integer("world_size", world_size, minimum=1)


def check_stochasticity(stochasticity: str) -> None:
    """Refuse a ``stochasticity`` that is none of "doubly", "row" and "column"."""
    if stochasticity not in get_args(Stochasticity):
        raise ValueError(
            f"stochasticity must be one of {', '.join(map(repr, get_args(Stochasticity)))}, "
            f"got {stochasticity!r}; pass one of them"
        )


def unserved_size(
    family: str, world_size: int, rule: str, serves: Callable[[int], bool], *, advice: str = ""
) -> ValueError:
    """Return the error for a world size that a family cannot serve; it names the nearest sizes that it can.

    Parameters
    ----------
    family
        The registered name.
    world_size
        The size asked for.
    rule
        The sizes served, in words: "a power of two".
    serves
        Whether a size is served; it must hold for some size above ``world_size``.
    advice
        What else the user can change, as a full sentence.
    """
    below = next((size for size in range(world_size - 1, 1, -1) if serves(size)), 1)
    above = next(size for size in itertools.count(world_size + 1) if serves(size))
    return ValueError(
        f"topology {family!r} needs a world_size that is {rule}, got {world_size}; the nearest are {below} and "
        f"{above}. {advice or 'Choose one of these, or a family for any size, such as one_peer_exponential.'}"
    )


def measure_stochasticity(round_: Round) -> Stochasticity | None:
    """Return what the sums of a round say: "doubly", "row" or "column", or ``None`` for neither."""
    rows = bool(np.all(np.abs(round_.row_sums() - 1) <= SUM_TOLERANCE))
    columns = bool(np.all(np.abs(round_.column_sums() - 1) <= SUM_TOLERANCE))
    if rows and columns:
        return "doubly"
    if rows:
        return "row"
    return "column" if columns else None


def check_sums(round_: Round, stochasticity: Stochasticity, *, where: str) -> None:
    """Check that rows (and, unless declared otherwise, columns) of a round's matrix sum to 1.

    Raises
    ------
    ValueError
        Naming the first row or column that does not, and its sum.
    """
    if stochasticity in ("doubly", "row"):
        _check_each_sum(
            "row",
            round_.row_sums(),
            where,
            "Scale the row; or, if only the columns are meant to sum to 1, declare stochasticity='column'.",
        )
    if stochasticity in ("doubly", "column"):
        _check_each_sum(
            "column",
            round_.column_sums(),
            where,
            "The mean over ranks would drift. Make the matrix doubly stochastic; or, if the algorithm corrects "
            "the bias, declare stochasticity='row'.",
        )


def _check_each_sum(kind: str, sums: npt.NDArray[np.float64], where: str, advice: str) -> None:
    wrong = np.flatnonzero(~(np.abs(sums - 1) <= SUM_TOLERANCE))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"{where}: {kind} {first} of the mixing matrix sums to {float(sums[first])!r}, it must sum to 1 "
            f"(within {SUM_TOLERANCE:g}). {advice}"
        )

"""Arrays of ranks and weights as users give them: converted only where nothing is lost."""

from __future__ import annotations

import numbers
import operator
import reprlib
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.matrix_storage import FloatArray, IntArray


def rank_array(argument: str, values: npt.ArrayLike, world_size: int) -> IntArray:
    """Return ranks as an array of integers from 0 to ``world_size - 1``.

    Raises
    ------
    TypeError
        If a value is not an integer (a ``bool`` or a ``float`` is not one).
    ValueError
        If a rank is out of range, or the lists have different lengths.
    """
    array = _as_array(argument, values)
    if array.dtype.kind not in "iu" and array.size:
        array = np.array([_rank(argument, value) for value in array.ravel().tolist()], dtype=object).reshape(
            array.shape
        )
    outside = array[(array < 0) | (array >= world_size)]
    if len(outside):
        raise ValueError(
            f"{argument} names rank {reprlib.repr(int(outside[0]))}, ranks go from 0 to {world_size - 1}; remove the "
            f"edge or raise world_size"
        )
    return array.astype(np.int64, copy=False)


def weight_array(argument: str, values: npt.ArrayLike) -> FloatArray:
    """Return weights as an array of float64.

    Raises
    ------
    TypeError
        If a value is not a real number (a ``bool`` or a text is not one).
    ValueError
        If the lists have different lengths.
    """
    array = _as_array(argument, values)
    if array.dtype.kind not in "iuf":
        array = np.array([check_number(argument, value) for value in array.ravel().tolist()]).reshape(array.shape)
    return array.astype(np.float64, copy=False)


def check_number(argument: str, value: Any) -> float:
    """Return a real number as a float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{argument} must be real numbers, got {reprlib.repr(value)} ({type(value).__name__}); pass floats, in a "
            f"list or an array"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{argument} must be real numbers that a float can hold, got {reprlib.repr(value)}; correct it"
        ) from None


def _rank(argument: str, value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be integers, got {reprlib.repr(value)} ({type(value).__name__}); pass plain ints, in a "
            f"list or an array"
        ) from None


def _as_array(argument: str, values: Any) -> npt.NDArray[Any]:
    if values is None or isinstance(values, str | bytes | dict | set | frozenset | nx.Graph):
        raise TypeError(
            f"{argument} must be an array or a list of numbers, got {reprlib.repr(values)} ({type(values).__name__})"
            f"{'; pass its edges, or use Topology.from_graph' if isinstance(values, nx.Graph) else '; pass a list'}"
        )
    try:
        # As objects where numpy would turn a truth value into a number, or a number into a text.
        array = np.asarray(values, dtype=object if _is_mixed(values) else None)
        if array.dtype == object and any(isinstance(value, list | tuple | np.ndarray) for value in array.flat):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{argument} must be lists of the same length, got {reprlib.repr(values)}; complete them"
        ) from None
    return array


def _is_mixed(values: Any) -> bool:
    """Whether nested lists hold truth values, or anything but numbers."""
    if not isinstance(values, list | tuple):
        return False
    kinds = set(map(type, values))
    if list in kinds or tuple in kinds:
        return any(map(_is_mixed, values))
    return any(kind is bool or issubclass(kind, np.bool_ | str | bytes) for kind in kinds)

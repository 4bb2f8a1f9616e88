"""Arrays of ranks and weights as users give them: converted only where nothing is lost."""

import reprlib
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.matrix_storage import FloatArray, IntArray


def rank_array(argument: str, values: npt.ArrayLike, world_size: int) -> IntArray:
    """Return ranks as an array of integers from 0 to ``world_size - 1``."""
    array = _as_array(argument, values, "iu", "integers")
    outside = array[(array < 0) | (array >= world_size)]
    if len(outside):
        raise ValueError(
            f"{argument} names rank {int(outside[0])}, ranks go from 0 to {world_size - 1}; remove the edge or raise "
            f"world_size"
        )
    return array.astype(np.int64, copy=False)


def weight_array(argument: str, values: npt.ArrayLike) -> FloatArray:
    """Return weights as an array of float64."""
    return _as_array(argument, values, "iuf", "real numbers").astype(np.float64, copy=False)


def _as_array(argument: str, values: Any, kinds: str, what: str) -> npt.NDArray[Any]:
    if isinstance(values, nx.Graph):
        raise TypeError(f"{argument} is a networkx graph; pass its edges, or use Topology.from_graph")
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in kinds and (array.size or array.dtype != np.float64):  # an empty list is of floats
        raise TypeError(
            f"{argument} must be {what}, in an array or in lists of the same length, got {reprlib.repr(values)}; "
            f"correct it"
        )
    return array

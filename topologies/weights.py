"""Weights for a graph: from its edges to a mixing matrix.

Every scheme is a formula for the weight that a rank gives to one neighbour; the rank keeps what the others leave,
``W[i, i] = 1 - sum_j W[i, j]``. Below, d is the number of others that a rank reads.

References
----------
Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004, section 4 (max_degree, metropolis).
Boyd, Diaconis and Xiao, "Fastest mixing Markov chain on a graph", 2004 (metropolis_hastings, lazy).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.round import Round
from topologies.storage import FloatArray, IntArray

#: Weight of an edge from the degrees of the rank that reads and of the one that is read, shape [edges] each, and
#: the largest degree of all.
Scheme = Callable[[FloatArray, FloatArray, float], FloatArray]


def metropolis(reader: FloatArray, sender: FloatArray, largest: float) -> FloatArray:
    """``1 / (1 + max(d_i, d_j))``: symmetric, and converges on every connected graph."""
    del largest
    return 1.0 / (1.0 + np.maximum(reader, sender))


def metropolis_hastings(reader: FloatArray, sender: FloatArray, largest: float) -> FloatArray:
    """``1 / max(d_i, d_j)``: faster, but ranks swap for ever on a regular bipartite graph."""
    del largest
    return 1.0 / np.maximum(reader, sender)


def max_degree(reader: FloatArray, sender: FloatArray, largest: float) -> FloatArray:
    """``1 / (1 + max_k d_k)``: the same on all edges, ``W = I - L / (1 + max d)``."""
    del sender
    return np.full_like(reader, 1.0 / (1.0 + largest))


def lazy(reader: FloatArray, sender: FloatArray, largest: float) -> FloatArray:
    """``(I + W) / 2`` for the W of metropolis: no negative eigenvalue."""
    return metropolis(reader, sender, largest) / 2.0


def uniform(reader: FloatArray, sender: FloatArray, largest: float) -> FloatArray:
    """``1 / (1 + d_i)``: the plain mean; only row-stochastic, so biased, on an irregular graph."""
    del sender, largest
    return 1.0 / (1.0 + reader)


SCHEMES: dict[str, Scheme] = {
    "metropolis": metropolis,
    "metropolis_hastings": metropolis_hastings,
    "max_degree": max_degree,
    "lazy": lazy,
    "uniform": uniform,
}

#: Schemes that also serve a directed graph.
DIRECTED_SCHEMES = ("uniform", "given")


def weighted_round(
    world_size: int, edges: npt.ArrayLike, weights: str = "metropolis", *, directed: bool = False
) -> Round:
    """Return the round along the edges of a graph.

    Parameters
    ----------
    world_size
        Number of ranks n.
    edges
        Shape ``[edges, 2]``, each edge once: pairs of ranks; if ``directed``, the second reads the first.
    weights
        One of :data:`SCHEMES`.

    Raises
    ------
    ValueError
        If the scheme is unknown, or not defined for a directed graph.
    """
    if weights not in SCHEMES:
        raise unknown_scheme(weights)
    if directed and weights not in DIRECTED_SCHEMES:
        raise ValueError(
            f"weights={weights!r} is defined for undirected graphs, this one is directed; use one of "
            f"{', '.join(map(repr, DIRECTED_SCHEMES))}, or graph.to_undirected()"
        )
    pairs = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    sources, targets = pairs[:, 0], pairs[:, 1]
    if not directed:
        sources, targets = np.concatenate((sources, targets)), np.concatenate((targets, sources))
    degree = np.bincount(targets, minlength=world_size).astype(np.float64)
    if weights == "metropolis_hastings" and _swaps_for_ever(world_size, pairs, degree):
        warnings.warn(
            "weights='metropolis_hastings' never converges on a regular bipartite graph (nobody keeps anything, "
            "the two halves swap for ever); use 'metropolis' or 'lazy'",
            UserWarning,
            stacklevel=2,
        )
    weight = SCHEMES[weights](degree[targets], degree[sources], float(degree.max()))
    return Round.from_edges(world_size, targets, sources, weight)


def unknown_scheme(weights: object) -> ValueError:
    """Return the error for a scheme that does not exist."""
    return ValueError(f"unknown weights {weights!r}; available: {', '.join(SCHEMES)}, given")


def _swaps_for_ever(world_size: int, pairs: IntArray, degree: FloatArray) -> bool:
    if not len(pairs) or np.any(degree != degree[0]):
        return False
    graph = nx.Graph()
    graph.add_nodes_from(range(world_size))
    graph.add_edges_from(pairs.tolist())
    return bool(nx.is_bipartite(graph))

"""Weights for a graph: from its edges to a mixing matrix.

A scheme is a formula for the weight that a rank gives to one neighbour; the rank keeps what the others leave,
``W[i, i] = 1 - sum_j W[i, j]``. Below, d is the number of others that a rank reads (and, unless the graph is
directed, is read by). The schemes of :mod:`topologies.graphs.spectral_weights` look at the whole graph instead.

References
----------
Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004, section 4 (max_degree, metropolis).
Boyd, Diaconis and Xiao, "Fastest mixing Markov chain on a graph", 2004 (metropolis_hastings, lazy).
Kempe, Dobra and Gehrke, "Gossip-based computation of aggregate information", 2003 (push_sum).
"""

import warnings
from collections.abc import Callable, Iterable

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.array_arguments import rank_array
from topologies.graphs.spectral_weights import SPECTRAL_SCHEMES
from topologies.matrix_storage import FloatArray
from topologies.round import Round
from topologies.validation import SUM_TOLERANCE, check_world_size

#: Name -> (number of ranks that an edge's reader reads, number that read its sender, shape [edges] each, the largest of
#: all) -> weights of shape [edges].
DEGREE_SCHEMES: dict[str, Callable[[FloatArray, FloatArray, float], FloatArray]] = {
    # Symmetric, and converges on every connected graph.
    "metropolis": lambda reader, sender, _: 1.0 / (1.0 + np.maximum(reader, sender)),
    # Faster, but ranks swap forever on a regular bipartite graph.
    "metropolis_hastings": lambda reader, sender, _: 1.0 / np.maximum(reader, sender),
    # The same on all edges, W = I - L / (1 + max d).
    "max_degree": lambda reader, _, largest: np.full_like(reader, 1.0 / (1.0 + largest)),
    # (I + W) / 2 for the W of metropolis: no negative eigenvalue.
    "lazy": lambda reader, sender, _: 1.0 / (1.0 + np.maximum(reader, sender)) / 2.0,
    # The plain mean; only row-stochastic, so biased, on an irregular graph.
    "uniform": lambda reader, _sender, _: 1.0 / (1.0 + reader),
    # A rank splits what it has: only column-stochastic on an irregular graph, for push-sum, which corrects the bias.
    "push_sum": lambda _, sender, _largest: 1.0 / (1.0 + sender),
}

SCHEMES = (*DEGREE_SCHEMES, *SPECTRAL_SCHEMES)

#: Schemes that also serve a directed graph.
DIRECTED_SCHEMES = ("uniform", "push_sum", "given")


def weighted_round(
    world_size: int, edges: npt.ArrayLike, weights: str = "metropolis", *, directed: bool = False
) -> Round:
    """Return the round along the edges of a graph.

    ``edges`` has the shape ``[edges, 2]``, each edge once: pairs of ranks; if ``directed``, the second reads the first.
    ``weights`` is one of ``SCHEMES``; of "best_constant" and "fdla" some may be negative.

    Raises
    ------
    ValueError
        If the scheme is unknown, or not defined for a directed graph; if "best_constant", "fdla" or "fmmc" meet a
        graph that is not connected, or the latter two one that is too large.
    ImportError
        If "fdla" or "fmmc" miss cvxpy.

    Examples
    --------
    >>> weighted_round(3, [(0, 1), (1, 2)], "best_constant").neighbours(1)
    {0: 0.5, 2: 0.5}
    """
    if weights not in SCHEMES:
        raise unknown_scheme(weights, SCHEMES)
    if directed and weights not in DIRECTED_SCHEMES:
        raise directed_graph(weights)
    world_size = check_world_size(world_size)
    pairs = rank_array("edges", edges, world_size)
    if pairs.size == 0:
        pairs = pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"edges must have the shape [edges, 2], got {list(pairs.shape)}; pass pairs of ranks")
    sources, targets = pairs[:, 0], pairs[:, 1]
    if not directed:
        sources, targets = np.concatenate((sources, targets)), np.concatenate((targets, sources))
    if weights in SPECTRAL_SCHEMES:
        if len(Round.from_edges(world_size, targets, sources, 1.0).groups) > 1:
            raise ValueError(
                f"edges do not join all ranks, and weights={weights!r} is defined for connected graphs; add edges, or "
                f"use weights='metropolis'"
            )
        weight = SPECTRAL_SCHEMES[weights](world_size, pairs) if len(pairs) else np.empty(0)
        return Round.from_edges(world_size, targets, sources, np.tile(weight, 2))
    reads = np.bincount(targets, minlength=world_size).astype(np.float64)
    is_read = np.bincount(sources, minlength=world_size).astype(np.float64)
    weight = DEGREE_SCHEMES[weights](reads[targets], is_read[sources], float(reads.max()))
    kept = 1.0 / (1.0 + is_read) if weights == "push_sum" else None
    round_ = Round.from_edges(world_size, targets, sources, weight, kept)
    if weights == "metropolis_hastings":
        warn_if_values_circulate(round_, weights)
    return round_


def warn_if_values_circulate(round_: Round, weights: str) -> None:
    """Warn of a W with positive edges that is periodic, and so has other eigenvalues of modulus 1."""
    if any(round_.self_weight(rank) > SUM_TOLERANCE for rank in range(round_.world_size)):
        return
    readers, senders, _ = round_.edges()
    graph = nx.DiGraph()
    graph.add_edges_from(zip(senders.tolist(), readers.tolist(), strict=True))
    if len(graph) and not nx.is_aperiodic(graph):
        warnings.warn(
            f"weights={weights!r} never converges on this graph (every self weight is 0, and the lengths of all paths "
            f"from a rank back to itself have a common divisor, as on a regular bipartite graph: the values circulate "
            f"forever); use 'metropolis' or 'lazy', or scale given weights down",
            UserWarning,
            stacklevel=3,
        )


def unknown_scheme(weights: object, known: Iterable[str]) -> ValueError:
    return ValueError(f"unknown weights {weights!r}; available: {', '.join(known)}")


def directed_graph(weights: str) -> ValueError:
    return ValueError(
        f"weights={weights!r} is defined for undirected graphs, this one is directed; use one of "
        f"{', '.join(map(repr, DIRECTED_SCHEMES))}, or graph.to_undirected()"
    )

"""Weights for a graph: from its edges to a mixing matrix.

A scheme is a formula for the weight that a rank gives to one neighbour; the rank keeps what the others leave,
``W[i, i] = 1 - sum_j W[i, j]``. Below, d is the number of others that a rank reads (and, unless the graph is
directed, is read by). Some look at the spectrum of the whole graph instead: the fastest of all weights that are equal,
and of all there are. With L the Laplacian, ``W = I - L_w`` for edge weights w, and the rate of a symmetric W is its
SLEM, ``||W - J||_2``. They may be negative where a comment says so; such a W still converges.

References
----------
Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004, section 4 (max_degree, metropolis), equations
23 (best_constant) and 17 (fdla).
Boyd, Diaconis and Xiao, "Fastest mixing Markov chain on a graph", 2004 (metropolis_hastings, lazy; fmmc: equation 6).
Kempe, Dobra and Gehrke, "Gossip-based computation of aggregate information", 2003 (push_sum).
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.graphs.spectrum import DENSE_WORLD_SIZE, laplacian, lowest
from topologies.matrix_storage import FloatArray, IntArray, rank_array
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


#: Largest number of ranks for which the semidefinite programs are solved. On one core they take about 0.3 s for 32
#: ranks, 4 s for 64 and a minute for 100: the time grows with the sixth power, the memory with the fourth.
MAX_PROGRAM_WORLD_SIZE = 100

#: Tried in turn until one reaches full accuracy; the last one may end with five digits.
_SOLVER_SETTINGS: tuple[dict[str, Any], ...] = ({}, {"max_step_fraction": 0.9}, {"equilibrate_enable": False})

#: A weight below this is what the solver leaves of 0: no edge, and nothing to send.
_SOLVER_TOLERANCE = 1e-6

#: Weights are rounded down to multiples of this. Such numbers add without rounding, so rows sum to exactly 1.
_GRAIN = 2.0**-40


def best_constant(world_size: int, pairs: IntArray) -> FloatArray:
    """``alpha = 2 / (lambda_max + lambda_2)`` of L, on every edge: the fastest ``W = I - alpha L``.

    What a rank of a large degree keeps may be negative. Optimal among all weights if all edges are alike (rings,
    hypercubes, complete and complete bipartite graphs).
    """
    unweighted = laplacian(world_size, pairs, np.ones(len(pairs)))
    if world_size <= DENSE_WORLD_SIZE:
        eigenvalues = np.linalg.eigvalsh(unweighted.toarray())
        return np.full(len(pairs), 2.0 / (eigenvalues[-1] + eigenvalues[1]))
    (second,), _ = lowest(unweighted, 1)
    # Anderson and Morley, 1985: no eigenvalue is above the largest sum of degrees along an edge.
    (largest,), _ = lowest(-unweighted, 1, floor=-float(unweighted.diagonal()[pairs].sum(axis=1).max()))
    return np.full(len(pairs), 2.0 / (second - largest))


def _solve(scheme: str, world_size: int, pairs: IntArray, *, nonnegative: bool) -> FloatArray:
    """Return the weights of the smallest SLEM, within about 1e-6: minimise s such that ``-s I <= W - J <= s I``."""
    if world_size > MAX_PROGRAM_WORLD_SIZE:
        raise ValueError(
            f"weights={scheme!r} solves a semidefinite program, which is hopeless beyond {MAX_PROGRAM_WORLD_SIZE} "
            f"ranks, and the graph has {world_size}; use weights='best_constant' or 'metropolis'"
        )
    from scipy.sparse import csc_array

    try:
        import cvxpy
    except ImportError as error:
        raise ImportError(
            f"weights={scheme!r} needs cvxpy; install it in a clone of the repository: pip install '.[weights]'"
        ) from error

    columns = np.tile(np.arange(len(pairs)), 2)
    ends = pairs.T.reshape(-1)
    signs = np.repeat((1.0, -1.0), len(pairs))
    incidence = csc_array((signs, (ends, columns)), shape=(world_size, len(pairs)))
    weight, bound, eye = cvxpy.Variable(len(pairs)), cvxpy.Variable(), np.eye(world_size)
    mixing = eye - incidence @ cvxpy.diag(weight) @ incidence.T
    # J only lowers the eigenvalue of the vector 1. Left out of the second constraint, that is as sparse as the graph,
    # and the solver ten times as fast.
    constraints = [mixing - 1.0 / world_size << bound * eye, mixing + bound * eye >> 0]
    if nonnegative:
        constraints += [weight >= 0, abs(incidence) @ weight <= 1]
    problem = cvxpy.Problem(cvxpy.Minimize(bound), constraints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says of its accuracy is looked at here
        for settings in _SOLVER_SETTINGS:
            problem.solve(solver=cvxpy.CLARABEL, **settings)
            if problem.status == cvxpy.OPTIMAL:
                break
    if weight.value is None:
        raise RuntimeError(
            f"the solver of weights={scheme!r} ended with the status {problem.status!r}; use "
            f"weights='best_constant' or 'metropolis' for this graph"
        )
    found = np.asarray(weight.value)
    if nonnegative:
        found = np.maximum(found, 0.0)
        given_away = np.bincount(ends, weights=np.tile(found, 2), minlength=world_size)
        found = found / max(1.0, float(given_away.max()))
    cleaned: FloatArray = np.floor(found / _GRAIN) * _GRAIN
    cleaned[np.abs(cleaned) < _SOLVER_TOLERANCE] = 0.0
    return cleaned


#: Name -> (world_size, pairs of shape [edges, 2], each once, of a connected graph) -> weights of shape [edges].
SPECTRAL_SCHEMES: dict[str, Callable[[int, IntArray], FloatArray]] = {
    "best_constant": best_constant,
    # Fastest distributed linear averaging: the symmetric W of the smallest SLEM; weights may be negative.
    "fdla": functools.partial(_solve, "fdla", nonnegative=False),
    # Fastest mixing Markov chain: the symmetric W >= 0 of the smallest SLEM.
    "fmmc": functools.partial(_solve, "fmmc", nonnegative=True),
}

SCHEMES = (*DEGREE_SCHEMES, *SPECTRAL_SCHEMES)

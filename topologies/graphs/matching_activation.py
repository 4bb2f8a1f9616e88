"""How often to use each matching of a graph: the probabilities and the step of MATCHA."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topologies.graphs.spectrum import DENSE_WORLD_SIZE, laplacian, lowest
from topologies.matrix_storage import FloatArray, IntArray

#: Relative distance from the best possible connectivity at which the search stops, and steps of the search at most.
_TOLERANCE, _SPARSE_TOLERANCE = 1e-9, 1e-7
_MAX_STEPS = 30

#: Relative accuracy of the step size, as a fraction of what a round removes.
_STEP_TOLERANCE = 1e-12

#: Numbers in the matrices of the reduced problem, at most.
_LARGEST_REDUCED = 1_000_000


@dataclass(frozen=True, eq=False)
class Activation:
    """Matchings that are used at random: ``W = I - alpha sum_j B_j L_j``, where B_j is 1 with probability p_j, else 0.

    ``connectivity`` is ``lambda_2(sum_j p_j L_j)``. ``squared_rate`` is ``||E[W^T W] - J||_2``, by which a round
    shrinks the expected square of the distance to the mean, at worst: what the paper calls rho.
    """

    matchings: tuple[IntArray, ...]
    probabilities: FloatArray
    alpha: float
    connectivity: float
    squared_rate: float

    @property
    def rate(self) -> float:
        """The square root of ``squared_rate``: comparable with the rates of other topologies."""
        return math.sqrt(self.squared_rate)


def activation(world_size: int, matchings: Sequence[IntArray], budget: float) -> Activation:
    """Return the best probabilities and step for using a share of the matchings of a connected graph.

    The problems, and their source, are those of :func:`topologies.families.graph_matchings.matcha`. Equal probabilities
    are kept wherever they are optimal.

    The connectivity is within 1e-9 of the optimum, relatively; above 300 ranks, where eigenvectors come from iterations
    on sparse matrices, within 1e-7. The search has as many unknowns as there are matchings. With hundreds of them on
    thousands of ranks (hubs) it ends after a fixed number of steps that can take a minute, some per cent below an upper
    bound; more than 1000 stay equally probable.
    """
    graph = _Matchings(world_size, matchings)
    probabilities, connectivity = _best_probabilities(graph, budget)
    alpha, squared_rate = _best_step(graph, probabilities)
    return Activation(tuple(matchings), probabilities, alpha, connectivity, squared_rate)


class _Matchings:
    """The Laplacians L_j of matchings, as lists of edges."""

    def __init__(self, world_size: int, matchings: Sequence[IntArray]) -> None:
        self.world_size = world_size
        self.edges = np.concatenate(matchings)
        self.sizes = np.array([len(matching) for matching in matchings])
        self.starts = np.cumsum(self.sizes) - self.sizes

    def laplacian(self, weights: FloatArray) -> Any:
        """Return ``sum_j w_j L_j``."""
        return laplacian(self.world_size, self.edges, np.repeat(weights, self.sizes))

    def forms(self, vectors: FloatArray) -> FloatArray:
        """Return ``V^T L_j V`` for all j, shape ``[m, k, k]``, for V of shape ``[n, k]``."""
        differences = vectors[self.edges[:, 0]] - vectors[self.edges[:, 1]]
        return np.stack([part.T @ part for part in np.split(differences, self.starts[1:])])

    def traces(self, vectors: FloatArray) -> FloatArray:
        """Return the mean over the columns v of ``v^T L_j v``, for all j."""
        differences = vectors[self.edges[:, 0]] - vectors[self.edges[:, 1]]
        return np.add.reduceat(np.mean(differences**2, axis=1), self.starts)


def _best_probabilities(graph: _Matchings, budget: float) -> tuple[FloatArray, float]:
    """Return p and ``lambda_2(L(p))``; an upper bound of it for all p ends the search.

    On the span of some vectors V, ``lambda_min(V^T L(p) V)`` is at least ``lambda_2(L(p))``. Its maximum is a small
    problem, solved exactly. The eigenvectors at that p then join V, until the maximum is no more than what was
    reached. (The eigenvalue is mostly multiple at the optimum, where gradients say little.)
    """
    n, m = graph.world_size, len(graph.sizes)
    best = np.full(m, float(budget))
    values, vectors = _low_end(graph, best)
    reached = float(values[0])
    cluster = vectors[:, values <= reached * (1 + 1e-9)]
    # Two bounds that are tight on symmetric graphs: from all of the eigenspace, and from the trace.
    bound = min(
        _largest_within_budget(graph.traces(cluster), budget),
        _largest_within_budget(2.0 * graph.sizes / (n - 1), budget),
    )
    tolerance = _TOLERANCE if n <= DENSE_WORLD_SIZE else _SPARSE_TOLERANCE
    span, largest_span = vectors, math.isqrt(_LARGEST_REDUCED // m)
    for _ in range(_MAX_STEPS if m**2 <= _LARGEST_REDUCED else 0):
        if bound - reached <= tolerance * reached:
            break
        forms = graph.forms(span) / reached
        probabilities, reduced_bound = _solve_reduced(forms, budget)
        bound = min(bound, reached * reduced_bound)
        on_span, rotation = np.linalg.eigh(np.tensordot(probabilities, forms, 1))
        claimed = reached * float(on_span[0])
        values, vectors = _low_end(graph, probabilities)
        if values[0] > reached * (1 + tolerance):
            best, reached = probabilities, float(values[0])
        if claimed - values[0] <= tolerance * reached:
            break  # on the span it is as it is on everything
        if span.shape[1] + vectors.shape[1] > largest_span:
            span = span @ rotation[:, : largest_span // 2]  # the directions that hold the eigenvalue down
        span = _orthonormal(np.concatenate((span, vectors), axis=1))
    return best, reached


def _low_end(graph: _Matchings, probabilities: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the lowest eigenvalues and vectors of L(p): eight, or all that are equal to the lowest if it is small."""
    n = graph.world_size
    count = n - 1 if n <= DENSE_WORLD_SIZE else 8
    values, vectors = lowest(graph.laplacian(probabilities), count)
    kept = max(8, int(np.sum(values <= values[0] * (1 + 1e-6))))
    return values[:kept], vectors[:, :kept]


def _orthonormal(vectors: FloatArray) -> FloatArray:
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    return left[:, sizes > 1e-8 * sizes[0]]


def _largest_within_budget(gains: FloatArray, budget: float) -> float:
    """Return the largest ``sum_j gains_j p_j`` for ``0 <= p_j <= 1`` and ``sum_j p_j <= budget m``, gains >= 0."""
    rising = np.sort(gains)
    room = budget * len(gains) - np.arange(len(gains))
    return float(rising[::-1] @ np.clip(room, 0.0, 1.0))


def _solve_reduced(forms: FloatArray, budget: float) -> tuple[FloatArray, float]:
    """Maximise ``lambda_min(sum_j p_j A_j)`` over ``0 < p_j < 1``, ``sum_j p_j = budget m``, for small matrices A_j.

    An interior point method: maximise ``tau t + log det(A(p) - t I) + sum_j log p_j + log(1 - p_j)`` by Newton steps
    for rising tau. Returned with p is an upper bound of the maximum: for every positive semidefinite Y of trace 1, such
    as the one that a Newton step leads to, ``lambda_min(A(p)) <= sum_j p_j tr(Y A_j)``, whatever the accuracy. All A_j
    are scaled so that the maximum is about 1.
    """
    m, k, _ = forms.shape
    p = np.full(m, float(budget))
    t = float(np.linalg.eigvalsh(np.tensordot(p, forms, 1))[0]) - 1.0
    tau, last_tau = 1.0, 10.0 * (k + 2 * m) / _TOLERANCE
    bound = np.inf
    while tau < last_tau:
        tau *= 10.0
        for _ in range(50):
            slack = np.tensordot(p, forms, 1) - t * np.eye(k)
            try:
                root = np.linalg.inv(np.linalg.cholesky(slack))
                moves = np.concatenate((root @ forms @ root.T, -(root @ root.T)[None]))
                step = _newton_step(moves, p, tau)
            except np.linalg.LinAlgError:  # at the limit of rounding
                return p, bound
            dp, dt = step[:m], float(step[m])
            change = np.tensordot(step, moves, 1)
            # Along the step the barrier is -tau dt s - sum log(1 + s r).
            ratios = np.concatenate((np.linalg.eigvalsh(change), dp / p, -dp / (1 - p)))
            if ratios[:k].max() < 1:
                dual = root.T @ (np.eye(k) - change) @ root
                gains = np.einsum("jab,ab->j", forms, dual / np.trace(dual))
                bound = min(bound, _largest_within_budget(gains, budget))
            size = _line_search(tau * dt, ratios)
            p, t = p + size * dp, t + size * dt
            if np.linalg.norm(ratios) < 0.1:
                break
    return p, bound


def _newton_step(moves: FloatArray, p: FloatArray, tau: float) -> FloatArray:
    """Return the Newton step for (p, t) that keeps the sum of p; moves: derivatives of the scaled slack."""
    m = len(p)
    flat = moves.reshape(m + 1, -1)
    hessian = flat @ flat.T
    hessian[np.arange(m), np.arange(m)] += 1 / p**2 + 1 / (1 - p) ** 2
    ascent = np.trace(moves, axis1=1, axis2=2)
    ascent[:m] += 1 / p - 1 / (1 - p)
    ascent[m] += tau
    scale = 1.0 / np.sqrt(np.diagonal(hessian))
    system = np.zeros((m + 2, m + 2))
    system[: m + 1, : m + 1] = hessian * np.outer(scale, scale)
    system[:m, m + 1] = system[m + 1, :m] = scale[:m] / scale[:m].max()
    step: FloatArray = scale * np.linalg.solve(system, np.append(scale * ascent, 0.0))[: m + 1]
    return step


def _line_search(slope: float, ratios: FloatArray) -> float:
    """Return the s > 0 that maximises ``slope s + sum log(1 + s r)``, by bisection of its falling derivative."""
    low, high = 0.0, 1.0 / max(1e-3, -float(ratios.min()))
    for _ in range(50):
        middle = (low + high) / 2
        if slope + float(np.sum(ratios / (1 + middle * ratios))) > 0:
            low = middle
        else:
            high = middle
    return low


def _best_step(graph: _Matchings, probabilities: FloatArray) -> tuple[float, float]:
    """Return alpha and ``||I - 2 alpha L + alpha^2 (L^2 + 2 L~) - J||``.

    For a unit vector v orthogonal to 1 the quadratic ``1 - 2 alpha v^T L v + alpha^2 v^T (L^2 + 2 L~) v`` is a lower
    bound of the norm, which is convex. The lowest point of the highest of some quadratics is the next alpha, and the
    vector that attains the norm there gives the next quadratic, until the norm is no more than the bound.
    """
    mean = graph.laplacian(probabilities)
    variance = 2.0 * graph.laplacian(probabilities * (1 - probabilities))
    square = mean @ mean + variance
    _, low = lowest(mean, 2)
    _, high = lowest(-square, 2, floor=-float(abs(square).sum(axis=0).max()))
    quadratics = [_quadratic(mean, square, vector) for vector in (*low.T, *high.T)]
    best, smallest = 0.0, 1.0
    for _ in range(_MAX_STEPS):
        alpha, bound = _lowest_point(quadratics)
        floor = min(2 * alpha * a - alpha**2 * b for a, b in quadratics)
        removed, vectors = lowest(2 * alpha * mean - alpha**2 * square, 2, floor=min(floor, 0.0))
        norm = 1.0 - float(removed[0])
        if norm < smallest:
            best, smallest = alpha, norm
        if smallest - bound <= _STEP_TOLERANCE:
            break
        quadratics.extend(_quadratic(mean, square, vector) for vector in vectors.T)
    return best, smallest


def _quadratic(mean: Any, square: Any, vector: FloatArray) -> tuple[float, float]:
    return float(vector @ (mean @ vector)), float(vector @ (square @ vector))


def _lowest_point(quadratics: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return where the maximum of the functions ``1 - 2 a x + b x^2`` is lowest, and its value there."""
    a, b = np.array(quadratics).T
    # Either at the lowest point of one of them, or where two of them cross.
    with np.errstate(divide="ignore", invalid="ignore"):
        crossings = 2 * (a[:, None] - a) / (b[:, None] - b)
    points = np.concatenate((a / b, crossings[np.isfinite(crossings) & (crossings > 0)]))
    heights = np.max(1 - 2 * np.outer(points, a) + np.outer(points**2, b), axis=1)
    first = int(np.argmin(heights))
    return float(points[first]), float(heights[first])

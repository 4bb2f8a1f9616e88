"""Weights that need the spectrum of the whole graph: the fastest of all that are equal, and of all there are.

With L the Laplacian, ``W = I - L_w`` for edge weights w, and the rate of a symmetric W is its SLEM, ``||W - J||_2``.
The results may hold negative weights where a docstring says so; such a W still converges.

References
----------
Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004 (best_constant: equation 23; fdla: 17).
Boyd, Diaconis and Xiao, "Fastest mixing Markov chain on a graph", 2004 (fmmc: equation 6).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from topologies.graphs.spectrum import DENSE_WORLD_SIZE, laplacian, lowest
from topologies.matrix_storage import FloatArray, IntArray

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

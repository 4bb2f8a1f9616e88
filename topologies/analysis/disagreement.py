"""What rounds do to a disagreement, as a linear map that is applied without a dense matrix, and its norms."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from topologies.graphs.spectrum import lowest
from topologies.matrix_storage import FloatArray
from topologies.round import Round

#: Up to so many ranks a spectrum is computed from the dense matrix, in O(n^3).
MAX_DENSE_SPECTRUM = 384

#: What is left of 0 after rounding.
ROUNDING = 1e-12


class Disagreement:
    """The map ``x -> R x - J x`` of the ranks' values to what separates them from the mean after some rounds.

    R is the product of the rounds' matrices; of column-stochastic rounds it is what push-sum makes of them, the
    ratio ``(M x) / (M 1)``. On a vector of values the error falls to ``||R - J||_2`` of its size, at worst.
    It takes at least one round, in the order in which they take place; ``column`` says that they are only
    column-stochastic.
    """

    def __init__(self, rounds: Sequence[Round], *, column: bool = False) -> None:
        self.world_size = rounds[0].world_size
        self.column = column
        self.rounds = [round_ for round_ in rounds if not round_.is_identity]
        self.scale = self._product(np.ones(self.world_size)) if column else np.ones(self.world_size)

    def apply(self, values: FloatArray) -> FloatArray:
        """Return ``(R - J) values`` for values of shape ``[n, ...]``."""
        return np.asarray(self._scaled(self._product(values)) - values.mean(axis=0))

    def apply_transposed(self, values: FloatArray) -> FloatArray:
        """Return ``(R - J)^T values``."""
        mixed = self._scaled(values)
        for round_ in reversed(self.rounds):
            mixed = round_.mix_transposed(mixed)
        return np.asarray(mixed - values.mean(axis=0))

    def matrix(self) -> FloatArray:
        """Return ``R - J`` as a dense matrix."""
        return self.apply(np.eye(self.world_size))

    def is_zero(self) -> bool:
        """Whether the rounds average exactly, to rounding.

        Beyond the sizes of dense spectra this is judged from eight random vectors: a map that is not 0 takes all
        of them to 0 with probability 0.
        """
        if self.world_size <= MAX_DENSE_SPECTRUM:
            return float(np.abs(self.matrix()).max()) <= ROUNDING
        return float(np.abs(self.apply(_random_vectors(self.world_size, 8))).max()) <= 1e-10

    def norm(self) -> float:
        """Return ``||R - J||_2``, the largest singular value."""
        if self.world_size <= MAX_DENSE_SPECTRUM:
            return float(np.linalg.norm(self.matrix(), ord=2))
        if self.is_zero():
            return 0.0
        squared = self._largest_modulus(lambda values: self.apply_transposed(self.apply(values)), symmetric=True)
        if squared is None and len(self.rounds) == 1 and self.rounds[0].is_symmetric:
            return _largest_of_symmetric(self.rounds[0].sparse())
        if squared is None:
            product = self._sparse_product()
            squared = _largest_near_one((product.T @ product).tocsc(), symmetric=True)
        return math.sqrt(squared)

    def spectral_radius(self) -> float:
        """Return the largest modulus of the eigenvalues of ``R - J``: the factor per use, in the long run."""
        if self.is_zero():
            return 0.0
        if len(self.rounds) == 1 and self.rounds[0].is_symmetric:
            return self.norm()
        if self.world_size <= MAX_DENSE_SPECTRUM:
            return float(np.abs(np.linalg.eigvals(self.matrix())).max())
        radius = self._largest_modulus(self.apply, symmetric=False)
        if radius is None:
            product = self._sparse_product()
            radius = _largest_near_one((product @ product).tocsc(), symmetric=False) ** 0.5
        return radius

    def _largest_modulus(self, apply: Callable[[FloatArray], FloatArray], *, symmetric: bool) -> float | None:
        """Return the largest modulus of the eigenvalues of a map, by Lanczos' or Arnoldi's method, if they converge.

        They do not where the largest eigenvalues lie close together, as in a long ring. What is only
        column-stochastic has no other way, and gets all the time that it needs.
        """
        from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh

        operator = LinearOperator((self.world_size,) * 2, matvec=lambda x: apply(x.reshape(-1)), dtype=np.float64)
        limits = {"ncv": 120, "maxiter": 10_000} if self.column else {"ncv": 40, "maxiter": 60}
        start = _random_vectors(self.world_size, 1)[:, 0]
        try:
            values, _ = (eigsh if symmetric else eigs)(operator, k=1, which="LM", v0=start, tol=1e-13, **limits)
        except ArpackNoConvergence:
            if self.column:
                raise
            return None
        return float(np.abs(values[0]))

    def _sparse_product(self) -> Any:
        return functools.reduce(
            lambda product, round_: round_.sparse() @ product, self.rounds[1:], self.rounds[0].sparse()
        )

    def stationary_weights(self) -> FloatArray:
        """Return the left eigenvector of R for the eigenvalue 1, with sum 1: the weights on which the ranks agree."""
        from scipy.sparse import eye_array
        from scipy.sparse.linalg import splu

        transposed = self._sparse_product().T
        shifted = splu((transposed - (1.0 + 1e-10) * eye_array(self.world_size, format="csr")).tocsc())
        weights = np.full(self.world_size, 1.0 / self.world_size)
        for _ in range(4):  # inverse iteration: each step gains ten digits or so
            weights = shifted.solve(weights)
            weights /= weights.sum()
        return np.asarray(weights)

    def _product(self, values: FloatArray) -> FloatArray:
        for round_ in self.rounds:
            values = round_.mix(values)
        return values

    def _scaled(self, values: FloatArray) -> FloatArray:
        return values / self.scale.reshape(-1, *[1] * (values.ndim - 1))


def _largest_of_symmetric(matrix: Any) -> float:
    """Return the second largest modulus of the eigenvalues of a sparse symmetric W, whose square may not be sparse."""
    from scipy.sparse import eye_array

    difference = (eye_array(matrix.shape[0], format="csr") - matrix).tocsr()
    (above,), _ = lowest(difference, 1)
    (below,), _ = lowest(-difference, 1, floor=-2.0)
    return max(1.0 - float(above), -1.0 - float(below))


def _largest_near_one(squared: Any, *, symmetric: bool) -> float:
    """Return the second largest modulus of the eigenvalues of the square of a sparse matrix, by factorisation.

    For matrices that mix slowly: the largest eigenvalues of their squares lie near 1, also if they swap values.
    """
    from scipy.sparse.linalg import eigs, eigsh

    start = _random_vectors(squared.shape[0], 1)[:, 0]
    near, _ = (eigsh if symmetric else eigs)(squared, k=4, sigma=1.0 + 1e-9, v0=start)
    others = np.delete(near, np.argmin(np.abs(near - 1.0)))  # the eigenvalue of the vector of ones
    return float(np.abs(others).max())


def _random_vectors(size: int, number: int) -> FloatArray:
    """Return the same Gaussian vectors every time, shape ``[size, number]``."""
    return np.random.default_rng(0).normal(size=(size, number))

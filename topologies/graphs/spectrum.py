"""Weighted Laplacians without dense matrices, and the low end of the spectrum of large symmetric matrices."""

from typing import Any

import numpy as np

from topologies.matrix_storage import FloatArray, IntArray

#: Up to this size a dense eigendecomposition is both faster and exact.
DENSE_WORLD_SIZE = 300

#: Lanczos restarts before the matrix is factorized, and relative residuals (eigenvalues err by far less).
_RESTARTS, _RESIDUAL = 40, 1e-9


def laplacian(world_size: int, edges: IntArray, weights: FloatArray) -> Any:
    """Return ``L = sum_e w_e (e_i - e_j)(e_i - e_j)^T`` as a scipy sparse array, for edges of shape ``[edges, 2]``."""
    from scipy import sparse  # heavy to import, and needed by few families

    one, other = edges[:, 0], edges[:, 1]
    degree = np.bincount(one, weights, world_size) + np.bincount(other, weights, world_size)
    rows = np.concatenate((one, other, np.arange(world_size)))
    columns = np.concatenate((other, one, np.arange(world_size)))
    entries = np.concatenate((-weights, -weights, degree))
    return sparse.csr_array((entries, (rows, columns)), shape=(world_size, world_size))


def lowest(matrix: Any, count: int, *, floor: float = 0.0) -> tuple[FloatArray, FloatArray]:
    """Return the lowest eigenvalues, rising, and unit eigenvectors ``[n, count]``, of a matrix without the vector 1.

    Small matrices are decomposed densely. On large ones Lanczos iterations find the low end where it is well
    separated (expanders); where it is not (rings, grids), the inverse of the shifted matrix separates it, and such
    matrices factorize with little fill. Deterministic: the iterations start from a fixed vector.

    The matrix is sparse and symmetric, with rows that sum to 0: the vector 1 has the eigenvalue 0 and does not count.
    ``floor`` is a guess of the lowest eigenvalue, best not above it; it only matters for speed.
    """
    from scipy.sparse import linalg

    n = matrix.shape[0]
    # A multiple of J lifts the vector 1 above all others.
    lift = 2.0 * float(abs(matrix).sum(axis=0).max()) or 1.0
    if n <= DENSE_WORLD_SIZE or count >= n - 1:
        values, vectors = np.linalg.eigh(matrix.toarray() + lift / n)
        return values[:-1][:count], vectors[:, :-1][:, :count]
    start = np.random.default_rng(0).standard_normal(n)
    lifted = linalg.LinearOperator((n, n), matvec=lambda x: matrix @ x + lift * x.mean(), dtype=np.float64)
    try:
        values, vectors = linalg.eigsh(
            lifted, count, which="SA", v0=start, ncv=count + 40, maxiter=_RESTARTS, tol=_RESIDUAL
        )
    except linalg.ArpackNoConvergence:
        shift, factors = _factorize_below(matrix, floor, 1e-6 * lift)

        def inverse(x: FloatArray) -> FloatArray:
            mean = x.mean()
            solved: FloatArray = factors.solve(x - mean)
            return np.asarray(solved - solved.mean() + mean / (lift - shift))

        values, vectors = linalg.eigsh(
            lifted,
            count,
            sigma=shift,
            OPinv=linalg.LinearOperator((n, n), matvec=inverse, dtype=np.float64),
            v0=start,
            ncv=count + 40,
        )
    order = np.argsort(values)
    return values[order], vectors[:, order]


def _factorize_below(matrix: Any, floor: float, gap: float) -> tuple[float, Any]:
    """Return a shift below all eigenvalues, about ``floor - gap`` if that is one, and the factors of A - shift I."""
    from scipy import sparse
    from scipy.sparse import linalg

    while True:
        shifted = sparse.csc_array(matrix - (floor - gap) * sparse.eye_array(matrix.shape[0]))
        factors = linalg.splu(
            shifted, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
        )
        # Sylvester: as many eigenvalues are below the shift as there are negative pivots.
        if (factors.U.diagonal() > 0).all():
            return floor - gap, factors
        gap *= 10.0

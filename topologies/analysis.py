"""How fast a topology mixes: products of its rounds, their spectra, and when they are exact.

These functions work on dense matrices, in O(n^3); J stands for 11^T / n, the exact average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from topologies.topology import Topology

FloatArray = npt.NDArray[np.float64]

#: Rounding left in a product that equals J in exact arithmetic.
_EXACT = 1e-12


def product(topology: Topology, num_rounds: int) -> FloatArray:
    """Return ``W_(k-1) ... W_1 W_0`` for the first k = ``num_rounds`` rounds, shape ``[n, n]``."""
    mixed = np.eye(topology.world_size)
    for t in range(num_rounds):
        mixed = topology.round(t).matrix() @ mixed
    return mixed


def beta(matrix: FloatArray) -> float:
    """Return ``||M - J||_2``, the largest factor by which M leaves a distance to the mean.

    The right measure for products, which need not be symmetric: their eigenvalues say nothing about one use.
    """
    return float(np.linalg.norm(matrix - 1.0 / len(matrix), ord=2))


def slem(matrix: FloatArray) -> float:
    """Return the second largest modulus of the eigenvalues of W: the rate when W is used in every round.

    It is 0 for a single rank. The eigenvalue 1 of the vector 1 belongs to the mean and does not count.
    """
    if len(matrix) == 1:
        return 0.0
    symmetric = np.array_equal(matrix, matrix.T)
    eigenvalues = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    return float(np.sort(np.abs(eigenvalues))[-2])


def exact_after(topology: Topology) -> int | None:
    """Return the smallest k for which the product of k rounds after the warm-up is J, or ``None`` if there is none.

    Searched up to one period and ceil(log2 n) exchanges more. A product that only comes ever closer to J is not
    exact: once it is within 1e-6 it counts only if the very next round brings it there.

    Raises
    ------
    ValueError
        If the topology has no period.
    """
    if topology.period is None:
        raise ValueError(f"topology {topology.name!r} has no period; exactness is a property of a repeated schedule")
    last = topology.phases[-1]
    repeated = last.topology
    assert repeated.period is not None
    mixed = np.eye(topology.world_size)
    for exchange in range(repeated.period + (topology.world_size - 1).bit_length()):
        mixed = repeated.round(exchange).matrix() @ mixed
        distance = float(np.abs(mixed - 1.0 / topology.world_size).max())
        if distance <= _EXACT:
            return (exchange + 1) * last.every
        if distance <= 1e-6:
            return None
    return None

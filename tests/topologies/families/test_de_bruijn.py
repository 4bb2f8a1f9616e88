"""de_bruijn: shifts of digits, self-loops, and a norm of 1 beside eigenvalues of 0."""

import numpy as np
import pytest

import topologies

SIZES = [(2, t) for t in range(1, 8)] + [(3, 1), (3, 2), (3, 4), (4, 3), (5, 2), (6, 2), (7, 1)]


def by_definition(n: int, p: int) -> np.ndarray:
    matrix = np.zeros((n, n))
    for i in range(n):
        for r in range(p):
            matrix[i, (p * i + r) % n] += 1 / p
    return matrix


@pytest.mark.parametrize(("p", "t"), SIZES)
def test_matrix_by_definition(p: int, t: int) -> None:
    n = p**t
    topology = topologies.build("de_bruijn", n, p=p)
    round_ = topology.round(0)
    matrix = by_definition(n, p)
    np.testing.assert_array_equal(round_.matrix(), matrix)
    for rank in range(n):
        # By the formulas of one rank, not by the whole round.
        assert round_.neighbours(rank) == {j: w for j, w in enumerate(matrix[rank]) if w and j != rank}
        assert list(round_.neighbours(rank)) == sorted(round_.neighbours(rank))
        assert round_.self_weight(rank) == matrix[rank, rank]
        assert round_.targets(rank) == tuple(i for i in range(n) if matrix[i, rank] and i != rank)
    assert topology.symmetric is (n == p)
    assert topology.doubly_stochastic
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-15)

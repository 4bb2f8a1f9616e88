"""Round: constructors, views and refusals."""

import pickle
from dataclasses import FrozenInstanceError

import networkx as nx
import numpy as np
import pytest
from contracts import assert_views_agree
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from topologies import Round


def test_uniform_groups_are_recognised_in_a_matrix() -> None:
    grouped = Round.from_groups(5, [(0, 3), (1, 2, 4)])
    recognised = Round.from_matrix(grouped.matrix())
    assert recognised.uniform_groups == grouped.uniform_groups
    assert recognised == grouped
    assert hash(recognised) == hash(grouped)
    assert recognised.is_symmetric


def test_a_round_is_immutable() -> None:
    round_ = Round.from_matrix([[0.5, 0.5], [0.5, 0.5]])
    with pytest.raises(FrozenInstanceError):
        round_.world_size = 3  # type: ignore[misc]
    round_.neighbours(0)[1] = 7
    assert round_.neighbours(0)[1] == 0.5
    with pytest.raises(nx.NetworkXError, match="Frozen"):
        round_.graph.add_edge(0, 5)


@given(hnp.arrays(np.float64, st.integers(1, 7).map(lambda n: (n, n)), elements=st.sampled_from([0, 0, 0, 0.5, -0.25])))
def test_any_matrix_survives(matrix: np.ndarray) -> None:
    round_ = Round.from_matrix(matrix)
    n = len(matrix)
    np.testing.assert_array_equal(round_.matrix(), matrix)
    rebuilt = [{**round_.neighbours(i), i: round_.self_weight(i)} for i in range(n)]
    assert Round.from_rows(rebuilt) == round_
    graph = nx.from_numpy_array(matrix.T, create_using=nx.DiGraph)
    assert round_.groups == tuple(sorted(tuple(sorted(c)) for c in nx.weakly_connected_components(graph)))
    uniform = all(np.array_equal(matrix[np.ix_(g, g)], np.full((len(g), len(g)), 1 / len(g))) for g in round_.groups)
    assert round_.uniform_groups == (round_.groups if uniform else None)
    assert round_.is_symmetric == np.array_equal(matrix, matrix.T)
    assert_views_agree(round_)
    np.testing.assert_allclose(round_.row_sums(), matrix.sum(axis=1))
    np.testing.assert_allclose(round_.column_sums(), matrix.sum(axis=0))


def test_a_formula_is_the_round_that_it_writes_down() -> None:
    shift = Round.from_formula(5, lambda i: {(i + 1) % 5: 0.25}, readers=lambda j: ((j - 1) % 5,))
    written = Round.from_rows([{(i + 1) % 5: 0.25} for i in range(5)])
    assert shift == written
    assert hash(shift) == hash(written)
    assert pickle.loads(pickle.dumps(shift)) == written
    for rank in range(5):
        assert shift.neighbours(rank) == written.neighbours(rank)
        assert shift.self_weight(rank) == written.self_weight(rank) == 0.75
        assert shift.targets(rank) == written.targets(rank) == ((rank - 1) % 5,)
    np.testing.assert_array_equal(shift.matrix(), written.matrix())
    assert shift.is_formula
    assert not written.is_formula
    assert repr(Round.from_formula(10**9, lambda i: {i ^ 1: 0.5})) == "<Round: a formula for 1000000000 ranks>"


@given(st.integers(1, 9), st.integers(0, 2**32), st.booleans())
def test_mixing_is_the_product_with_the_matrix(world_size: int, seed: int, grouped: bool) -> None:
    generator = np.random.default_rng(seed)
    if grouped:
        labels = generator.integers(3, size=world_size)
        round_ = Round.from_groups(world_size, [np.flatnonzero(labels == label).tolist() for label in range(3)])
    else:
        matrix = generator.normal(size=(world_size, world_size)) * (generator.random((world_size, world_size)) < 0.5)
        round_ = Round.from_matrix(matrix)
    for shape in ((world_size,), (world_size, 3), (world_size, 2, 2)):
        values = generator.normal(size=shape)
        matrix = round_.matrix()
        np.testing.assert_allclose(round_.mix(values), np.tensordot(matrix, values, axes=1), atol=1e-12)
        np.testing.assert_allclose(round_.mix_transposed(values), np.tensordot(matrix.T, values, axes=1), atol=1e-12)

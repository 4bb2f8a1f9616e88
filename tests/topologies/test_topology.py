"""Round and Topology: constructors, views, schedules, promises, JSON, pickling, refusals."""

import pickle
from dataclasses import FrozenInstanceError

import networkx as nx
import numpy as np
import pytest
from contracts import assert_views_agree
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import topologies
from topologies import Round, Topology

PAIRS = [Round.from_groups(4, [(0, 1), (2, 3)]), Round.from_groups(4, [(0, 2), (1, 3)])]


def draw_pair(_: int, generator: np.random.Generator) -> Round:
    return Round.from_groups(6, [generator.choice(6, 2, replace=False).tolist()])


def test_exactness_is_not_a_small_error() -> None:
    n = 200
    almost = np.full((n, n), 1 / n) + 1e-5 * (np.eye(n) - 1 / n)
    assert Topology.from_rounds([Round.from_matrix(almost)]).exact_after is None
    assert Topology.from_rounds([Round.from_matrix(np.full((n, n), 1 / n))]).exact_after == 1


def test_a_seeded_function_gives_round_t_without_the_earlier_ones() -> None:
    built = []

    def record(t: int, generator: np.random.Generator) -> Round:
        built.append(t)
        return draw_pair(t, generator)

    late = Topology.from_function(record, seed=3).round(1000)
    assert built == [0, 1000]
    other = Topology.from_function(draw_pair, seed=3)
    for t in range(200):
        other.round(t)
    assert other.round(1000) == late
    assert other.round(0) == Topology.from_function(draw_pair, seed=3).round(0)
    different = Topology.from_function(draw_pair, seed=4)
    assert any(other.round(t) != different.round(t) for t in range(10))


def test_stochasticity_in_one_direction_must_be_declared() -> None:
    biased = Round.from_matrix([[0.5, 0.5], [0.25, 0.75]])
    with pytest.raises(ValueError, match=r"round 0 .*column 0 .*sums to 0\.75.*stochasticity='row'"):
        Topology.from_rounds([biased])
    pushed = Round.from_matrix(biased.matrix().T)
    for round_, kind, wrong in ((biased, "row", pushed), (pushed, "column", biased)):
        topology = Topology.from_rounds([round_], stochasticity=kind)
        assert topology.stochasticity == kind
        assert not topology.doubly_stochastic
        assert Topology.from_json(topology.to_json()) == topology
        with pytest.raises(ValueError, match=rf"{kind} 0 of the mixing matrix sums to 0\.75"):
            Topology.from_rounds([wrong], stochasticity=kind)


def test_a_function_is_checked_when_its_rounds_are_first_used() -> None:
    def breaks_later(t: int) -> Round:
        return Round.identity(2) if t < 3 else Round.from_matrix([[0.5, 0.4], [0.5, 0.6]])

    topology = Topology.from_function(breaks_later)
    topology.round(2)
    with pytest.raises(ValueError, match=r"round 3 .*row 0 .*0\.9"):
        topology.round(3)
    grows = Topology.from_function(lambda t: Round.identity(2 + t))
    with pytest.raises(ValueError, match=r"round 1 .* is for 3 ranks, the topology for 2"):
        grows.round(1)


# ---------------------------------------------------------------------- for another number of ranks


def assert_same(found: Topology, expected: Topology) -> None:
    assert (found.name, found.world_size, found.options) == (expected.name, expected.world_size, expected.options)
    for t in range(12):
        np.testing.assert_array_equal(found.round(t).matrix(), expected.round(t).matrix())


@pytest.mark.parametrize("world_size", [1, 3, 5, 8])
def test_a_family_keeps_its_options(world_size: int) -> None:
    topology = topologies.build("base", 6, k=2)
    assert_same(topology.resized(world_size), topologies.build("base", world_size, k=2))


def test_expressions_are_built_of_their_parts() -> None:
    def build(n: int) -> Topology:
        first = topologies.build("complete", n).every(2)
        later = topologies.build("ring", n).interleave(topologies.build("star", n))
        return first.then(later.averaged_every(5), after=6)

    assert_same(build(8).resized(5), build(5))
    assert_same(build(8).permuted(range(7, -1, -1)).resized(5), build(5))


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

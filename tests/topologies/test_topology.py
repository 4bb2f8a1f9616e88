"""Topology: schedules from rounds and functions, promises, JSON, pickling, other sizes."""

import numpy as np
import pytest

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

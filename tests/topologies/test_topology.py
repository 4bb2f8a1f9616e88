"""Topology: schedules from rounds and functions, promises, JSON, pickling."""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import topologies
from topologies import Round, Topology

PAIRS = [Round.from_groups(4, [(0, 1), (2, 3)]), Round.from_groups(4, [(0, 2), (1, 3)])]


def rotate(t: int) -> Round:
    return Round.from_rows([{(i + 1 + t) % 5: 0.5} for i in range(5)])


def draw_pair(_: int, generator: np.random.Generator) -> Round:
    return Round.from_groups(6, [generator.choice(6, 2, replace=False).tolist()])


def test_rounds_repeat() -> None:
    topology = Topology.from_rounds(PAIRS)
    assert topology.world_size == 4
    assert topology.period == 2
    assert [topology.round(t) for t in range(4)] == PAIRS * 2
    assert topology.exact_after == 2
    assert topology.symmetric
    assert topology.doubly_stochastic


def test_exactness_is_not_a_small_error() -> None:
    n = 200
    almost = np.full((n, n), 1 / n) + 1e-5 * (np.eye(n) - 1 / n)
    assert Topology.from_rounds([Round.from_matrix(almost)]).exact_after is None
    assert Topology.from_rounds([Round.from_matrix(np.full((n, n), 1 / n))]).exact_after == 1


def test_exactness_may_take_longer_than_a_period() -> None:
    reads = [[0, 1], [2, 3], [0, 1], [2, 3]]  # a de Bruijn graph: nilpotent apart from the mean
    topology = Topology.from_rounds(
        [Round.from_rows([dict.fromkeys(row, 0.5) | {i: 0.5 * (i in row)} for i, row in enumerate(reads)])]
    )
    assert topology.exact_after == 2
    assert not topology.symmetric


def test_a_function_with_a_period() -> None:
    topology = Topology.from_function(rotate, period=4)
    assert topology.round(6) == rotate(2)
    assert not topology.symmetric
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert [again.round(t) for t in range(4)] == [rotate(t) for t in range(4)]


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


def test_an_aperiodic_function_has_no_json() -> None:
    topology = Topology.from_function(draw_pair, seed=0, name="draws")
    with pytest.raises(ValueError, match=r"'draws'.*without a period.*topologies.register"):
        topology.to_json()
    assert topology.exact_after is None
    assert not topology.symmetric
    assert Topology.from_function(draw_pair, seed=0, symmetric=True).symmetric


def test_row_stochastic_must_be_declared() -> None:
    biased = Round.from_matrix([[0.5, 0.5], [0.25, 0.75]])
    with pytest.raises(ValueError, match=r"round 0 .*column 0 .*sums to 0\.75.*stochasticity='row'"):
        Topology.from_rounds([biased])
    topology = Topology.from_rounds([biased], stochasticity="row")
    assert topology.stochasticity == "row"
    assert not topology.doubly_stochastic
    assert Topology.from_json(topology.to_json()) == topology


def test_column_stochastic_must_be_declared() -> None:
    pushed = Round.from_matrix([[0.5, 0.25], [0.5, 0.75]])
    with pytest.raises(ValueError, match=r"row 0 of the mixing matrix sums to 0\.75"):
        Topology.from_rounds([pushed], stochasticity="row")
    topology = Topology.from_rounds([pushed], stochasticity="column")
    assert topology.stochasticity == "column"
    with pytest.raises(ValueError, match=r"column 0 .* sums to 0\.75"):
        Topology.from_rounds([Round.from_matrix([[0.5, 0.5], [0.25, 0.75]])], stochasticity="column")


def test_the_round_and_the_row_are_named() -> None:
    wrong = Round.from_matrix([[1, 0, 0], [0, 0.5, 0.4], [0, 0.5, 0.6]])
    with pytest.raises(ValueError, match=r"round 1 of topology 'mine': row 1 of the mixing matrix sums to 0\.9"):
        Topology.from_rounds([Round.identity(3), wrong], name="mine")


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


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Topology.from_rounds([]), ValueError, "rounds is empty"),
        (lambda: Topology.from_rounds([Round.identity(2), Round.identity(3)]), ValueError, "round 1 .* 3 ranks"),
        (lambda: Topology.from_rounds([np.eye(2)]), TypeError, r"rounds\[0\] is a ndarray.*Round.from_matrix"),
        (lambda: Topology.from_rounds(PAIRS, stochasticity="rows"), ValueError, "'doubly', 'row', 'column'"),
        (lambda: Topology.from_function(lambda _: np.eye(2)), TypeError, "must return a Round, got ndarray"),
        (lambda: Topology.from_function(rotate, period=0), ValueError, "period must be at least 1"),
        (lambda: Topology.from_function(draw_pair, seed=-1), ValueError, "seed must be at least 0"),
        (lambda: Topology.from_rounds(PAIRS).round(-1), ValueError, "t must be at least 0, got -1"),
        (lambda: Topology.from_rounds(PAIRS).round(0.5), TypeError, "t must be an integer"),
        (lambda: Topology.from_json("{"), ValueError, "not JSON"),
        (lambda: Topology.from_json("[]"), ValueError, "needs the keys"),
        (lambda: Topology.from_json('{"name": "rong", "world_size": 2, "options": {}}'), ValueError, "unknown"),
    ],
)
def test_refusals(build, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_a_topology_is_immutable() -> None:
    topology = topologies.build("grid", 6)
    with pytest.raises(FrozenInstanceError):
        topology.world_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        topology.options["shape"] = (1, 6)  # type: ignore[index]


def test_equality_is_by_content() -> None:
    assert Topology.from_rounds(PAIRS) == Topology.from_rounds(PAIRS)
    assert Topology.from_rounds(PAIRS) != Topology.from_rounds(PAIRS[::-1])
    assert topologies.build("ring", 4) != topologies.build("ring", 5)
    assert topologies.build("ring", 3) != topologies.build("complete", 3)
    seeds = [topologies.build("random_matching", 4, seed=seed) for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert topologies.build("ring", 4) != "ring"
    drawn = Topology.from_function(draw_pair, seed=0)
    same = drawn
    assert drawn == same
    assert drawn != Topology.from_function(draw_pair, seed=0)


def test_repr() -> None:
    assert repr(topologies.build("grid", 6)) == "Topology('grid', world_size=6, shape=(2, 3), period=1)"
    graph = topologies.build("torus", 64).round(0).graph
    assert repr(Topology.from_graph(graph, "given")) == (
        "Topology('graph', world_size=64, graph={...}, weights='given', period=1)"
    )


def test_json_holds_plain_options() -> None:
    topology = topologies.build("hyper_cuboid", np.int64(6), factors=np.array([2, 3]))
    assert json.loads(topology.to_json()) == {"name": "hyper_cuboid", "world_size": 6, "options": {"factors": [2, 3]}}
    assert topology.options == {"factors": (2, 3)}

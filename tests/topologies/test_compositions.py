"""Topology.every and Topology.then: exactly the rounds that they promise, whatever they are made of."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import topologies
from topologies import Round, Topology, draw

#: The families that serve four ranks.
FAMILIES = [name for name in topologies.available() if topologies.variants(name, 4)]
NUM_ROUNDS = 80

Schedule = Callable[[int], np.ndarray]
"""A schedule by its definition: t -> W."""


def family(name: str, n: int = 4) -> Topology:
    return topologies.variants(name, n)[0]


def every(schedule: Schedule, k: int, n: int) -> Schedule:
    return lambda t: schedule((t + 1) // k - 1) if (t + 1) % k == 0 else np.eye(n)


def then(schedule: Schedule, other: Schedule, after: int) -> Schedule:
    return lambda t: schedule(t) if t < after else other(t - after)


def assert_rounds(topology: Topology, schedule: Schedule) -> None:
    for t in range(NUM_ROUNDS):
        np.testing.assert_array_equal(topology.round(t).matrix(), schedule(t), err_msg=f"{topology.name}: round {t}")


def first_exact(schedule: Schedule, n: int, start: int, num_rounds: int) -> int | None:
    mixed = np.eye(n)
    for t in range(start, start + num_rounds):
        mixed = schedule(t) @ mixed
        if np.abs(mixed - 1 / n).max() < 1e-12:
            return t - start + 1
    return None


def expression(seed: int) -> tuple[Topology, Schedule]:
    """A random expression, by the methods and by the definitions."""
    generator = np.random.default_rng(seed)

    def grow(depth: int) -> tuple[Topology, Schedule]:
        if depth == 0:
            leaf = family(str(generator.choice(FAMILIES)))
            return leaf, lambda t: leaf.round(t).matrix()
        topology, schedule = grow(depth - 1)
        if generator.random() < 0.4:
            k = int(generator.integers(1, 4))
            return topology.every(k), every(schedule, k, 4)
        other, other_schedule = grow(depth - 1)
        after = int(generator.integers(0, 12))
        return topology.then(other, after=after), then(schedule, other_schedule, after)

    return grow(3)


@pytest.mark.parametrize("seed", range(16))
def test_expressions_have_the_rounds_of_their_definition(seed: int) -> None:
    topology, schedule = expression(seed)
    assert_rounds(topology, schedule)
    if topology.period is not None:
        start, period = topology.warmup, topology.period
        assert_rounds(topology, lambda t: schedule(t if t < start else start + (t - start) % period))
        whole = [schedule(t) for t in range(start + period)]
        assert not topology.symmetric or all(np.allclose(each, each.T, rtol=0, atol=1e-12) for each in whole)
        assert topology.exact_after == first_exact(schedule, 4, start, 2 * period + 8 * topology.phases[-1].every)
    assert Topology.from_json(topology.to_json()) == topology


def test_json_holds_the_expression() -> None:
    topology = family("complete").then(family("random_matching").every(4), after=100)
    assert json.loads(topology.to_json()) == {
        "phases": [
            {"start": 0, "every": 1, "topology": {"name": "complete", "world_size": 4, "options": {}}},
            {
                "start": 100,
                "every": 4,
                "topology": {"name": "random_matching", "world_size": 4, "options": {"seed": 0}},
            },
        ]
    }


def test_nothing_enumerates_long_schedules(tmp_path: Path) -> None:
    built: list[int] = []

    def draw_pair(t: int, generator: np.random.Generator) -> Round:
        built.append(t)
        return Round.from_groups(4, [generator.choice(4, 2, replace=False).tolist()])

    drawn = Topology.from_function(draw_pair, seed=0, symmetric=True)
    million = 10**6
    topology = drawn.every(million).then(family("one_peer_exponential").every(million), after=million**2)
    assert topology.period == 2 * million
    assert topology.exact_after == 2 * million
    assert not topology.symmetric  # one_peer_exponential is directed
    assert topology.round(million**2 + 10**15 * million + million - 1) == family("one_peer_exponential").round(0)
    assert topology.round(7 * million - 1) == drawn.round(6)
    found = topology.describe()
    assert (found.num_rounds, found.mean_messages, found.bytes_per_rank) == (2 * million, 1 / million, 1 / million)
    assert (found.rounds_to_tolerance, found.beta, found.diameter) == (2 * million, 0.0, 2)
    draw(topology, tmp_path / "long.svg")
    assert set(built) <= {*range(16)}


def test_stochasticity_is_what_all_rounds_keep() -> None:
    row = Topology.from_rounds([Round.from_matrix([[0.5, 0.5], [0.25, 0.75]])], stochasticity="row")
    column = Topology.from_rounds([Round.from_matrix([[0.5, 0.25], [0.5, 0.75]])], stochasticity="column")
    ring = family("ring", 2)
    assert row.every(3).stochasticity == row.then(ring, after=2).stochasticity == "row"
    assert ring.then(column, after=2).stochasticity == column.then(column, after=1).stochasticity == "column"
    assert row.then(ring, after=2).round(1) == row.round(0)
    assert row.then(ring, after=1).then(column, after=0) == column


def test_description_of_a_warm_up() -> None:
    found = topologies.build("complete", 8).then(topologies.build("ring", 8), after=100).describe()
    assert (found.warmup, found.period, found.num_rounds, found.exact_after) == (100, 1, 1, None)
    assert (found.max_sends, found.max_receives, found.mean_messages) == (7, 7, 2.0)
    assert found.slem == topologies.build("ring", 8).describe().slem
    assert not found.uniform_groups  # though those of the warm-up are
    assert "period          1 round, after a warm-up of 100 rounds\n" in str(found)
    pairs = Topology.from_rounds([Round.from_groups(4, [(0, 1), (2, 3)])])
    assert not family("complete").then(pairs, after=1).describe().connected


@pytest.mark.parametrize(
    ("topology", "title", "numbers"),
    [
        (
            family("complete").then(family("one_peer_ring").every(3), after=100),
            "complete.then(one_peer_ring.every(3), after=100) 4 ranks, period 6 after 100 rounds",
            [0, 102, 105],
        ),
        (
            family("random_matching").every(9).then(family("random_matching"), after=20),
            "random_matching(seed=0).every(9).then(random_matching(seed=0), after=20) 4 ranks, no period after 20 ",
            [8, 17, 20, 21, 22, 23],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Topology) else "",
)
def test_a_picture_shows_the_exchanges(topology: Topology, title: str, numbers: list[int], tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw(topology, path)
    text = path.read_text()
    assert title in " ".join(re.findall("<!-- (.*?) -->", text))  # a long title has several lines
    assert [t for t in range(200) if f"<!-- round {t}: " in text] == numbers
    draw(topology, path, rounds=3)
    assert [t for t in range(200) if f"<!-- round {t}: " in path.read_text()] == [0, 1, 2]

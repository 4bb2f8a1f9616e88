"""Thousands of ranks, without a clock: no dense matrix anywhere."""

import math
import tracemalloc
from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies import Round, Topology, analysis

pytestmark = pytest.mark.slow  # together

#: Chordal cycles need a prime.
SIZES = (4096, 4093)

#: Their smallest rounds have a quarter of all pairs as edges: the arrays of edges are as large as a matrix.
DENSE = {"paley": 1021}

#: These do not grow with the number of ranks.
FIXED = ("florentine", "davis", "karate_club", "les_miserables")


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that a call has in use at once; numpy counts its arrays too."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [name for name in topologies.available() if name not in FIXED])
def test_rounds_and_rows_form_no_dense_matrix(name: str) -> None:
    sizes = (DENSE[name],) if name in DENSE else SIZES
    first, *_ = next(filter(None, (topologies.variants(name, size) for size in sizes)))
    n, options = first.world_size, dict(first.options)
    del first

    def use() -> None:
        topology = topologies.build(name, n, **options)
        for t in range(min(topology.period or 3, 3)):
            round_ = topology.round(t)
            for rank in range(0, n, 61):
                round_.neighbours(rank)

    assert peak_bytes(use) < (50 if name in DENSE else 1) * n * n  # a matrix of bytes is too much


def test_a_hub_does_not_make_a_matrix_dense() -> None:
    wheel = topologies.build("graph", 2048, graph=nx.wheel_graph(2048))
    found = []
    assert peak_bytes(lambda: found.append(analysis.slem(wheel))) < 2048**2
    # On the rim, a ring of 2047, the weights are 1/4, and 1/2048 for the hub.
    assert found[0] == pytest.approx(1 - 1 / 2048 - (1 - math.cos(2 * math.pi / 2047)) / 2, abs=1e-11)


def test_an_edge_between_many_makes_no_large_array() -> None:
    round_ = Round.from_edges(1024, *np.nonzero(~np.eye(1024, dtype=bool)), 1 / 1025)  # not quite uniform
    topology = Topology.from_rounds([round_])
    found = []
    # One set of 128 bytes per edge would be 128 MiB.
    assert peak_bytes(lambda: found.append(analysis.diameter(topology))) < 60 * 1024**2
    assert found == [1]


def test_a_slow_random_schedule_is_extrapolated() -> None:
    asked = []

    def swap(t: int, generator: np.random.Generator) -> Round:
        asked.append(t)
        pairs = (2 * np.arange(200) + generator.integers(2)) % 400
        return Round.from_groups(400, np.stack((pairs, (pairs + 1) % 400), axis=1))

    slow = Topology.from_function(swap, seed=0, symmetric=True)
    found, rate = analysis.rounds_to(slow, 0.01), analysis.consensus_rate(slow)
    assert found > 16_384
    assert rate**found <= 0.01 < rate ** (found - 1)
    assert max(asked) < 64

"""What single families do beyond the contract: rounds written out by hand, graphs of networkx, options and refusals."""

import inspect
import re
import warnings
from collections import Counter

import networkx as nx
import numpy as np
import pytest

import topologies


def rounds(name: str, world_size: int, **options: object) -> list[tuple[tuple[int, ...], ...]]:
    topology = topologies.build(name, world_size, **options)
    return [topology.round(t).groups for t in range(topology.period)]


def test_grid_and_torus_count_ranks_by_rows() -> None:
    assert topologies.build("grid", 6).options["shape"] == (2, 3)
    assert topologies.build("grid", 6).round(0).peers(0) == (1, 3)
    assert topologies.build("grid", 6, shape=(3, 2)).round(0).peers(2) == (0, 3, 4)
    assert topologies.build("torus", 12).options["shape"] == (3, 4)
    assert topologies.build("torus", 12).round(0).peers(0) == (1, 3, 4, 8)
    assert topologies.build("torus", 8, shape=(2, 4)).round(0).peers(0) == (1, 3, 4)
    with pytest.warns(UserWarning, match="topology 'grid' for 7 ranks, a prime number, is 1 x 7, and so the path"):
        assert topologies.build("grid", 7).round(0) == topologies.build("path", 7).round(0)
    with pytest.warns(UserWarning, match="topology 'torus' for 5 ranks, a prime number, is 1 x 5, and so the ring"):
        torus = topologies.build("torus", 5)
    assert torus.round(0).matrix() == pytest.approx(topologies.build("ring", 5).round(0).matrix())


def test_alternating_exp_ring_by_hand() -> None:
    # Nodes (0 1)(2 3)(4 5)(6 7). Hop 0 pairs nodes 0-1 (number 0) and 2-3 (1), hop 1 pairs 0-2 (2) and 1-3 (3).
    assert rounds("alternating_exp_ring", 8, local_size=2) == [
        ((0, 1), (2, 3), (4, 5, 6, 7)),
        ((0, 1, 2, 3), (4, 5), (6, 7)),
        ((0, 1), (2, 3, 6, 7), (4, 5)),
        ((0, 1, 4, 5), (2, 3), (6, 7)),
    ]


def test_random_matching_is_uniform_and_idles_one_rank() -> None:
    topology = topologies.build("random_matching", 4, seed=1)
    counts = Counter(topology.round(t).groups for t in range(3000))
    assert len(counts) == 3
    assert all(abs(count - 1000) < 130 for count in counts.values())  # 5 standard deviations
    idle = Counter(
        next(group[0] for group in topologies.build("random_matching", 3, seed=1).round(t).groups if len(group) == 1)
        for t in range(300)
    )
    assert set(idle) == {0, 1, 2}


CASES = [
    *(("paley", p, nx.paley_graph(p).to_undirected()) for p in (5, 13, 17, 29, 101)),
    *(("margulis", m * m, nx.margulis_gabber_galil_graph(m)) for m in (2, 3, 4, 5, 8, 13)),
    *(("chordal", p, nx.chordal_cycle_graph(p)) for p in (2, 3, 5, 7, 11, 61)),
]


@pytest.mark.parametrize(("name", "n", "graph"), CASES, ids=[f"{name}-{n}" for name, n, _ in CASES])
def test_ranks_are_joined_as_in_networkx(name: str, n: int, graph: nx.Graph) -> None:
    edges, expected = topologies.build(name, n).round(0).matrix(), nx.to_numpy_array(graph, nodelist=sorted(graph))
    for matrix in (edges, expected):
        np.fill_diagonal(matrix, 0.0)
    np.testing.assert_array_equal(edges != 0, expected != 0)


GRAPHS = {
    "karate_club": nx.karate_club_graph,
    "davis": nx.davis_southern_women_graph,
    "florentine": nx.florentine_families_graph,
    "les_miserables": nx.les_miserables_graph,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_ranks_are_the_sorted_labels(name: str) -> None:
    graph = GRAPHS[name]()
    labels = sorted(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the weights in the data are ignored without a word
        round_ = topologies.build(name, len(graph)).round(0)
    for rank, label in enumerate(labels):
        assert [labels[other] for other in round_.peers(rank)] == sorted(graph[label])


@pytest.mark.parametrize("name", GRAPHS)
def test_docstrings_state_what_is_measured(name: str) -> None:
    size = len(GRAPHS[name]())
    description = topologies.build(name, size).describe()
    text = inspect.getdoc(topologies.family(name)) or ""
    assert f"sizes : {size}\n" in text
    assert f"degree : at most {description.max_sends}, {description.mean_messages:.1f} on average" in text
    slem = float(re.search(r"SLEM (0\.\d{4})\n", text)[1])  # type: ignore[index]
    assert description.slem == pytest.approx(slem, abs=5e-5)

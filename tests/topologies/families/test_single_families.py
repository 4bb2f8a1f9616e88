"""What families do beyond the contract: rounds by hand, graphs of networkx, random and given ones, EquiTopo."""

import inspect
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
from topologies import Topology
from topologies.analysis.static_rounds import only_graph
from topologies.families.equitopo import partner_in_walk


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
    round_ = topologies.build(name, len(graph)).round(0)  # the weights in the data are ignored without a warning
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


FAMILIES: dict[str, dict[str, Any]] = {
    "random_regular": {"degree": 3},
    "erdos_renyi": {"probability": 0.3},
    "watts_strogatz": {"neighbours": 4, "probability": 0.5},
    "barabasi_albert": {"attachments": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_follows_from_size_options_and_seed(name: str) -> None:
    options = FAMILIES[name]
    topology = topologies.build(name, 20, **options, seed=3)
    assert topologies.build(name, 20, **options, seed=3).round(0) == topology.round(0)
    others = [topologies.build(name, 20, **options, seed=seed).round(0) for seed in range(3)]
    assert all(other != topology.round(0) for other in others)
    # Neither the weights nor the state of any global generator has a say.
    np.random.seed(0)  # noqa: NPY002
    lazy = topologies.build(name, 20, **options, seed=3, weights="lazy")
    assert set(lazy.round(0).graph.edges) == set(topology.round(0).graph.edges)


@pytest.mark.parametrize("name", FAMILIES)
def test_schemes_are_those_of_graphs(name: str) -> None:
    graph = nx.Graph(only_graph(topologies.build(name, 12)).edges)  # fmmc leaves out edges that do not help
    for scheme in ("metropolis", "best_constant", "fmmc"):
        topology = topologies.build(name, 12, weights=scheme)
        assert topology.options["weights"] == scheme
        assert topology.round(0) == Topology.from_graph(graph, scheme).round(0)
        assert Topology.from_json(topology.to_json()) == topology
    irregular = name != "random_regular"
    assert topologies.build(name, 12, weights="uniform").stochasticity == ("row" if irregular else "doubly")
    assert topologies.build(name, 12, weights="push_sum").stochasticity == ("column" if irregular else "doubly")
    with pytest.raises(ValueError, match=r"unknown weights 'given'; available: metropolis, .* fmmc$"):
        topologies.build(name, 12, weights="given")


@pytest.mark.parametrize(("n", "degree"), [(7, 2), (64, 2), (9, 8), (34, 32), (64, 62), (20, 11), (20, 10), (21, 10)])
def test_random_regular_serves_every_degree(n: int, degree: int) -> None:
    rounds = [topologies.build("random_regular", n, degree=degree, seed=seed).round(0) for seed in (0, 1)]
    assert all(set(round_.num_sources().tolist()) == {degree} for round_ in rounds)
    assert (rounds[0] != rounds[1]) is (degree < n - 1)


@pytest.mark.parametrize(("name", "remedy"), [("random_regular", "degree, 3"), ("watts_strogatz", "neighbours, 4")])
def test_attempts_are_bounded(name: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(nx, "is_connected", lambda graph: bool(drawn.append(graph)))
    with pytest.raises(ValueError, match=rf"'{name}' drew 100 graphs from seed 0 .* raise the {remedy}$"):
        topologies.build(name, 30)
    assert len(drawn) == 100


def test_erdos_renyi_draws_again_until_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    real = nx.is_connected
    monkeypatch.setattr(nx, "is_connected", lambda graph: drawn.append(graph) or real(graph))
    topology = topologies.build("erdos_renyi", 12, probability=0.2, seed=1)
    assert len(drawn) > 1
    assert [real(graph) for graph in drawn] == [False] * (len(drawn) - 1) + [True]
    assert {frozenset(edge) for edge in drawn[-1].edges} == {frozenset(edge) for edge in only_graph(topology).edges}
    assert len({frozenset(graph.edges) for graph in drawn}) > 1


def test_erdos_renyi_has_twice_the_edges_that_connect_by_default() -> None:
    default = topologies.build("erdos_renyi", 60).options["probability"]
    assert default == pytest.approx(2 * math.log(60) / 60)


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_recorded_as_what_they_became(name: str) -> None:
    options = topologies.build(name, 9).options
    assert None not in options.values()
    assert topologies.build(name, 9, **options) == topologies.build(name, 9)


def used_edges(topology: Topology) -> list[tuple[int, ...]]:
    return sorted(group for t in range(topology.period) for group in topology.round(t).groups if len(group) > 1)


@pytest.mark.parametrize("name", ["ring", "star", "complete"])
def test_a_family_by_name_is_the_graph_of_its_round(name: str) -> None:
    topology, round_ = topologies.build("matchings", 12, graph=name), topologies.build(name, 12).round(0)
    assert topology.options["graph"] == name
    assert used_edges(topology) == [(i, j) for i in range(12) for j in round_.neighbours(i) if i < j]


@pytest.mark.parametrize("family", ["matchings", "matcha"])
def test_all_forms_of_a_graph_are_the_same(family: str, tmp_path: Path) -> None:
    graph = nx.cycle_graph(6)
    path = tmp_path / "cycle.graphml"
    nx.write_graphml(graph, path)
    forms: list[Any] = [graph, graph.to_directed(), nx.node_link_data(graph, edges="edges"), path, str(path)]
    built = [topologies.build(family, 6, graph=form) for form in forms]
    path.unlink()
    named = topologies.build(family, 6, graph="ring")
    for topology in built:
        again = Topology.from_json(topology.to_json())
        assert again == topology == built[0]
        for t in range(6):
            assert again.round(t) == topology.round(t) == named.round(t)
    assert named.options["graph"] == "ring"
    assert Topology.from_json(named.to_json()) == named


def shift(n: int, hop: int) -> np.ndarray:
    """P with (P x)_i = x_(i + hop mod n)."""
    return np.roll(np.eye(n), hop, axis=1)


def basis(n: int, permutation: np.ndarray) -> np.ndarray:
    return np.eye(n) / n + (n - 1) / n * permutation


def walk(n: int, hop: int, start: int = 0) -> dict[int, int]:
    """The definition, word by word."""
    partner: dict[int, int] = {}
    for step in range(n):
        i = (start + step) % n
        j = (i + hop) % n
        if i not in partner and j not in partner:
            partner[i], partner[j] = j, i
    return partner


@given(st.integers(2, 400), st.data())
def test_partners_are_those_of_the_walk_from_any_start(n: int, data: st.DataObject) -> None:
    hop, start = data.draw(st.integers(1, n - 1)), data.draw(st.integers(0, n - 1))
    partner = walk(n, hop, start)
    for rank in range(n):
        found = partner_in_walk(n, hop, (rank - start) % n)
        assert (None if found is None else (found + start) % n) == partner.get(rank)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 10, 16])
@pytest.mark.parametrize("eta", [0.5, 0.2, 1])
def test_equi_dyn_by_definition(n: int, eta: float) -> None:
    both = [topologies.build("equi_dyn", n, seed=3, directed=directed, eta=eta) for directed in (False, True)]
    for t in range(12):
        generator = np.random.default_rng((3, t))
        hop, start = int(generator.integers(1, n)), int(generator.integers(n))
        partner = walk(n, hop, start)
        swaps = np.eye(n)[[partner.get(i, i) for i in range(n)]]
        for topology, permutation in zip(both, (swaps, shift(n, hop)), strict=True):
            expected = (1 - eta) * np.eye(n) + eta * basis(n, permutation)
            np.testing.assert_allclose(topology.round(t).matrix(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 33])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_equi_static_is_the_mean_of_its_circulants(n: int, m: int) -> None:
    for seed in range(4):
        hops = np.random.default_rng((seed,)).integers(1, n, size=m).tolist()
        mean = np.mean([basis(n, shift(n, hop)) for hop in hops], axis=0)
        directed = topologies.build("equi_static", n, m=m, seed=seed, directed=True).round(0)
        np.testing.assert_allclose(directed.matrix(), mean, rtol=0, atol=1e-15)
        assert len(directed.neighbours(0)) == len(set(hops))
        undirected = topologies.build("equi_static", n, m=m, seed=seed).round(0)
        np.testing.assert_allclose(undirected.matrix(), (mean + mean.T) / 2, rtol=0, atol=1e-15)
        assert undirected.is_symmetric

"""The graph that matchings and matcha are built on, and the matchings in turn."""

from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import topologies
from topologies import Topology
from topologies.families.graph_option import undirected_edges
from topologies.family_registry import FAMILIES


def used_edges(topology: Topology) -> list[tuple[int, ...]]:
    assert topology.period is not None
    return sorted(group for t in range(topology.period) for group in topology.round(t).groups if len(group) > 1)


@pytest.mark.parametrize("n", [4, 10, 32])
def test_matchings_of_an_even_ring_is_one_peer_ring(n: int) -> None:
    topology, known = topologies.build("matchings", n, graph="ring"), topologies.build("one_peer_ring", n)
    assert [topology.round(t) for t in range(2)] == [known.round(t) for t in range(2)]


def test_matchings_use_every_edge_once_per_period() -> None:
    graph = nx.karate_club_graph()
    plain = nx.Graph(graph.edges)
    topology = topologies.build("matchings", 34, graph=plain)
    assert topology.period == 17
    assert used_edges(topology) == sorted(tuple(sorted(edge)) for edge in graph.edges)


@pytest.mark.parametrize("name", ["ring", "path", "star", "torus", "grid", "undirected_exponential", "complete"])
def test_a_family_by_name_is_the_graph_of_its_round(name: str) -> None:
    edges, recorded = undirected_edges(12, name)
    round_ = topologies.build(name, 12).round(0)
    assert recorded == name
    assert sorted(map(tuple, edges.tolist())) == [(i, j) for i in range(12) for j in round_.neighbours(i) if i < j]


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


def test_matchings_of_labels_follow_their_order() -> None:
    graph = nx.Graph([("b", "c"), ("a", "b")])
    assert used_edges(topologies.build("matchings", 3, graph=graph)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("family", ["matchings", "matcha"])
@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0)]), "graph is directed.*to_undirected"),
        (nx.Graph([(0, 1), (2, 3)]), "graph is not connected: 2 components"),
        (nx.cycle_graph(5), "graph has 5 nodes, world_size is 4.*use world_size 5"),
        (nx.Graph(), "graph has no nodes"),
        ("rings", "graph='rings' is no registered family.*did you mean 'ring'.*networkx graph"),
        ("!", "graph='!' is no registered family, and no file without a suffix; pass one of"),
        ("directed_ring", "graph='directed_ring' names a directed family.*'torus'"),
        ("one_peer_ring", "graph='one_peer_ring' names a family with 2 rounds"),
        ("random_matching", "graph='random_matching' names a family with no period"),
        ("hyper_hypercube", "graph='hyper_hypercube' names a family that has no default options.*'k'"),
        ("graph", "graph='graph' names a family that has no default options"),
        (family_name := "matchings", f"graph='{family_name}' names a family that has no default options"),
        ("cycle.png", "suffix '.png'"),
    ],
)
def test_graphs_that_are_refused(family: str, graph: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topologies.build(family, 4, graph=graph)


def test_a_family_that_does_not_serve_the_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"graph='hypercube' names a family that does not serve this size.*8 and 16"):
        topologies.build("matcha", 12, graph="hypercube")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        topologies.build("matchings", 4, graph=tmp_path / "missing.json")


def test_a_family_whose_round_leaves_ranks_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))

    @topologies.register("apart")
    def apart(world_size: int) -> Topology:
        return Topology.from_rounds([topologies.Round.from_groups(world_size, [(0, 1), (2, 3)])])

    with pytest.raises(ValueError, match="graph='apart' names a family that does not connect 4 ranks"):
        topologies.build("matchings", 4, graph="apart")

"""The graph that matchings and matcha are built on, and the matchings in turn."""

from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import topologies
from topologies import Topology


def used_edges(topology: Topology) -> list[tuple[int, ...]]:
    return sorted(group for t in range(topology.period) for group in topology.round(t).groups if len(group) > 1)


def test_matchings_use_every_edge_once_per_period() -> None:
    graph = nx.karate_club_graph()
    plain = nx.Graph(graph.edges)
    topology = topologies.build("matchings", 34, graph=plain)
    assert topology.period == 17
    assert used_edges(topology) == sorted(tuple(sorted(edge)) for edge in graph.edges)


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

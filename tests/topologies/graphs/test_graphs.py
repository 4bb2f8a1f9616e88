"""Graphs as topologies: weight schemes, files, labels, and what is refused or put right."""

import json
from functools import partial
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies import Topology

KITE = nx.Graph([(0, 1), (1, 2), (2, 0), (2, 3)])


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("metropolis", [[5, 4, 3, 0], [4, 5, 3, 0], [3, 3, 3, 3], [0, 0, 3, 9]]),
        ("metropolis_hastings", [[2, 6, 4, 0], [6, 2, 4, 0], [4, 4, 0, 4], [0, 0, 4, 8]]),
        ("max_degree", [[6, 3, 3, 0], [3, 6, 3, 0], [3, 3, 3, 3], [0, 0, 3, 9]]),
        ("lazy", [[8.5, 2, 1.5, 0], [2, 8.5, 1.5, 0], [1.5, 1.5, 7.5, 1.5], [0, 0, 1.5, 10.5]]),
        ("uniform", [[4, 4, 4, 0], [4, 4, 4, 0], [3, 3, 3, 3], [0, 0, 6, 6]]),
    ],
)
def test_schemes_by_hand(scheme: str, expected: list[list[float]]) -> None:
    found = Topology.from_graph(KITE, scheme).round(0).matrix()
    np.testing.assert_allclose(found, np.array(expected) / 12, atol=1e-15)


@pytest.mark.parametrize("graph", [nx.cycle_graph(6), nx.hypercube_graph(3), nx.path_graph(2)])
def test_metropolis_hastings_warns_where_it_never_converges(graph: nx.Graph) -> None:
    with pytest.warns(UserWarning, match="never converges on this graph .* as on a regular bipartite graph"):
        topology = Topology.from_graph(graph, "metropolis_hastings")
    assert topology.describe().slem == pytest.approx(1.0)


def test_given_weights_of_a_round_come_back() -> None:
    for name in ("one_peer_exponential", "exponential", "star", "torus"):
        round_ = topologies.build(name, 6).round(0)
        topology = Topology.from_graph(round_.graph, "given")
        assert topology.round(0) == round_
        assert Topology.from_json(topology.to_json()) == topology


def test_given_weights_leave_the_rest_to_oneself() -> None:
    graph = nx.Graph()
    graph.add_edge("a", "b", weight=0.25)
    found = Topology.from_graph(graph, "given").round(0).matrix()
    np.testing.assert_array_equal(found, [[0.75, 0.25], [0.25, 0.75]])
    directed = nx.DiGraph()
    directed.add_weighted_edges_from([(0, 1, 0.5), (1, 0, 0.25)])
    topology = Topology.from_graph(directed, "given")
    np.testing.assert_array_equal(topology.round(0).matrix(), [[0.75, 0.25], [0.5, 0.5]])
    assert topology.stochasticity == "row"


def test_given_weights_that_leave_less_than_nothing_are_refused() -> None:
    graph = nx.Graph([(0, 1, {"weight": 0.75}), (1, 2, {"weight": 0.5})])
    with pytest.raises(ValueError, match=r"rank 1 gives to others sum to 1\.25, .* -0\.25 for itself; scale them"):
        Topology.from_graph(graph, "given")
    thirds = nx.complete_graph(11)
    nx.set_edge_attributes(thirds, 0.1, "weight")  # ten of them sum to 1 but for the last bits
    assert Topology.from_graph(thirds, "given").round(0).self_weight(0) == 0.0


WEIGHTED = nx.Graph([(one, other, {"weight": 2.0 + one}) for one, other in KITE.edges])


@pytest.mark.parametrize(
    ("graph", "warning"),
    [
        (nx.Graph([*KITE.edges, (1, 1)]), "1 self-loops of graph are dropped"),
        (nx.MultiGraph([*KITE.edges, (0, 1)]), "parallel edges of graph count once"),
        (WEIGHTED, r"edge weights of graph are ignored.*weights='given'"),
    ],
)
def test_what_a_topology_does_not_have_is_left_out_with_a_warning(graph: nx.Graph, warning: str) -> None:
    num_edges = graph.number_of_edges()
    with pytest.warns(UserWarning, match=warning):
        topology = Topology.from_graph(graph)
    assert topology == Topology.from_graph(KITE) == Topology.from_graph(nx.MultiGraph(KITE))
    assert graph.number_of_edges() == num_edges


def test_given_weights_are_those_of_every_edge_and_of_parallel_ones_alike() -> None:
    twice = nx.MultiGraph()
    twice.add_weighted_edges_from([(0, 1, 0.25), (0, 1, 0.5)])
    with pytest.raises(ValueError, match=r"parallel edges 0 - 1 of different weights.*weights='given'"):
        Topology.from_graph(twice, "given")
    twice.edges[0, 1, 1]["weight"] = 0.25
    with pytest.warns(UserWarning, match="parallel edges of graph count once"):
        assert Topology.from_graph(twice, "given").round(0).neighbours(0) == {1: 0.25}
    with pytest.raises(ValueError, match=r"edge 0 - 1 of graph has no weight"):
        Topology.from_graph(nx.path_graph(2), "given")


WRITE = {
    ".graphml": nx.write_graphml,
    ".gexf": nx.write_gexf,
    ".edgelist": nx.write_edgelist,
    ".txt": partial(nx.write_edgelist, data=False),
    ".json": lambda graph, path: path.write_text(json.dumps(nx.node_link_data(graph, edges="edges"))),
}


LABELS = {"integers": lambda rank: 7 * rank, "texts of integers": str, "texts": lambda rank: "nmlkjihgfedcba"[rank]}


# An edge list does not say that it is directed.
@pytest.mark.parametrize(
    ("suffix", "directed"),
    [
        *((suffix, False) for suffix in (".graphml", ".gexf", ".json", ".edgelist", ".txt")),
        *((suffix, True) for suffix in (".graphml", ".gexf", ".json")),
    ],
)
@pytest.mark.parametrize("labels", LABELS)
def test_files_keep_labels_and_directions(suffix: str, directed: bool, labels: str, tmp_path: Path) -> None:
    graph = nx.DiGraph([*nx.cycle_graph(13, create_using=nx.DiGraph).edges, (0, 5), (0, 9), (3, 1)])
    if not directed:
        graph = graph.to_undirected()
    graph = nx.relabel_nodes(graph, LABELS[labels])
    path = tmp_path / f"net{suffix}"
    WRITE[suffix](graph, path)
    weights = "push_sum" if directed else "metropolis"
    topology = topologies.build("graph", 13, graph=path, weights=weights)
    rank_of = {label: rank for rank, label in enumerate(sorted(graph, key=int if "integers" in labels else None))}
    for label, rank in rank_of.items():
        assert topology.round(0).targets(rank) == tuple(sorted(rank_of[other] for other in graph[label]))
    assert topology == Topology.from_graph(graph, weights)
    assert Topology.from_json(topology.to_json()) == topology

"""What users give by mistake: refused by name and value, never read in part and never taken for something else."""

import copy
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies import Round, Topology, weighted_round


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n2 0\n",
        "# a triangle\n0 1 # one\n\n1\t2\r\n2 0",
        "0,1,0.5\n1, 2, 0.5\n2,0,0.5\n",
        "0 1 {'weight': 0.5, 'colours': 'red, blue'}\n1 2 {}\n2 0\n",
        "0,1,{'weight': 0.5}\n1,2,{}\n2,0\n",
        "\ufeff0 1\n1 2\n2 0\n",
    ],
)
def test_edge_lists_are_read_whole(text: str, tmp_path: Path) -> None:
    path = tmp_path / "net.edges"
    path.write_text(text, encoding="utf-8")
    assert Topology.from_graph(path) == Topology.from_graph(nx.cycle_graph(3))


@pytest.mark.parametrize(("suffix", "write"), [(".graphml", nx.write_graphml), (".gexf", nx.write_gexf)])
def test_files_whose_edges_name_other_nodes_are_refused(suffix: str, write: Any, tmp_path: Path) -> None:
    path = tmp_path / f"net{suffix}"
    write(nx.path_graph(3), path)
    assert Topology.from_graph(path) == Topology.from_graph(nx.path_graph(3))
    path.write_text(path.read_text().replace('target="2"', 'target="7"'))
    with pytest.raises(ValueError, match="the graph lists 3 nodes, but there are 4"):
        Topology.from_graph(path)


def test_given_weights_that_never_settle_warn() -> None:
    pair = nx.Graph([(0, 1, {"weight": 1.0})])
    cycle = nx.cycle_graph(3, create_using=nx.DiGraph)
    nx.set_edge_attributes(cycle, 1.0, "weight")
    for graph in (pair, cycle):
        with pytest.warns(UserWarning, match="weights='given' never converges on this graph"):
            Topology.from_graph(graph, "given")
    triangle = nx.cycle_graph(3)
    nx.set_edge_attributes(triangle, 0.5, "weight")
    assert Topology.from_graph(triangle, "given").describe().slem < 1


def test_nothing_that_a_round_hands_out_changes_it() -> None:
    for round_ in (topologies.build("ring", 8).round(0), Round.from_groups(4, [(0, 1)])):
        matrix = round_.matrix()
        for array in round_.edges():
            if array.flags.writeable:
                array[:] = 0
        round_.sparse().data[:] = 0
        round_.graph[0][1]["weight"] = 77
        np.testing.assert_array_equal(round_.matrix(), matrix)
        np.testing.assert_array_equal(round_.mix(np.eye(len(matrix))), matrix)
        np.testing.assert_array_equal(round_.sparse().toarray(), matrix)
        np.testing.assert_array_equal(nx.to_numpy_array(round_.graph, nodelist=range(len(matrix))).T, matrix)


def test_recorded_options_are_read_only_all_the_way_down() -> None:
    topology = topologies.build("graph", 4, graph=nx.star_graph(3))
    before = topology.to_json()
    recorded = topology.options["graph"]
    for change in (
        lambda: recorded.__setitem__("edges", ()),
        lambda: recorded["nodes"][0].update(id=7),
        lambda: copy.deepcopy(recorded).pop("edges"),
        lambda: pickle.loads(pickle.dumps(recorded)).clear(),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    topology.describe().options["graph"] = None
    for other in (Topology.from_json(before), topologies.build("graph", 4, **topology.options)):
        assert other == topology
        assert other.to_json() == before


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("net.txt", "0 1\n1 2\n3\n2 0\n", r"net\.txt'.*line 3 is '3', it must be 'a b', 'a b weight' or"),
        ("net.txt", "0,1,\n", r"line 1 is"),
        ("net.txt", "0 1\n1 2 heavy\n", r"could not convert string to float: 'heavy'"),
        ("net.dot", "graph {}", r"net\.dot' has none of the suffixes \.graphml, \.gexf"),
        ("net.graphml", "<graph", r"does not hold a graph in the format of its suffix"),
        ("net.json", '{"nodes": [{"id": 0}, {"id": 0}], "edges": []}', "lists 2 nodes, but there are 1"),
        ("net.json", '{"nodes": 5, "edges": []}', "this is no node-link data"),
    ],
)
def test_files_that_hold_no_graph_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.from_graph(path)


def test_all_kinds_of_exact_numbers_are_taken() -> None:
    expected = Round.from_edges(3, [0, 1], [1, 0], [0.5, 0.5])
    ranks = np.array([0, 1], dtype=np.uint8)
    assert Round.from_edges(3, ranks, ranks[::-1], np.float32(0.5)) == expected
    assert Round.from_rows([{np.int64(1): np.float32(0.5)}, {0: Fraction(1, 2)}, {}]) == expected  # type: ignore[dict-item]
    assert weighted_round(3, nx.path_graph(3).edges) == weighted_round(3, [(0, 1), (1, 2)])  # type: ignore[arg-type]
    assert weighted_round(2, []).is_identity

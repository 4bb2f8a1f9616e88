"""What users give by mistake: refused by name and value, never read in part and never taken for something else."""

from pathlib import Path

import networkx as nx
import pytest

import topologies
from topologies import Topology

TRIANGLE = Topology.from_graph(nx.cycle_graph(3))


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n2 0\n",
        "# a triangle\n0 1 # one\n\n1\t2\r\n2 0",
        "0,1\n1, 2\n2,0\n",
        "0,1,0.5\n1,2,0.5\n2,0,0.5\n",
        "0 1 {'weight': 0.5, 'colours': 'red, blue'}\n1 2 {}\n2 0\n",
        "0,1,{'weight': 0.5}\n1,2,{}\n2,0\n",
        "\ufeff0 1\n1 2\n2 0\n",
    ],
)
def test_edge_lists_are_read_whole(text: str, tmp_path: Path) -> None:
    path = tmp_path / "net.edges"
    path.write_text(text, encoding="utf-8")
    assert Topology.from_graph(path) == TRIANGLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 2\n3\n2 0\n", r"net\.txt'.*line 3 is '3', it must be 'a b', 'a b weight' or 'a b \{\.\.\}'"),
        ("0,1\n1,2\n2 0\n", r"net\.txt'.*line 3 is '2 0'"),
        ("2 0\n0,1\n1,2\n", r"line 2 is '0,1'"),
        ("0, 1\n1 2\n", r"line 2 is '1 2'"),
        ("0 1\n1, 2\n", r"line 2 is '1, 2'"),
        ("0,1 0.5\n1,2 0.5\n", r"line 1 is"),
        ("0,1,\n", r"line 1 is"),
        ("0;1\n", r"line 1 is '0;1'"),
        ("0 1 2 3\n", r"line 1 is '0 1 2 3'"),
        ("0 1 0.5 {}\n", r"line 1 is"),
        ("0 1\n1 2 heavy\n", r"line 2 has the weight 'heavy', which is no number"),
        ("0 1 {weight}\n", r"line 1 ends in '\{weight\}', which is no mapping of attributes"),
        ("0 1 {1: 2}\n", r"line 1 ends in '\{1: 2\}'"),
        ("# nothing\n\n", r"net\.txt' has no nodes"),
    ],
)
def test_lines_that_are_no_edge_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.from_graph(path)


def test_a_byte_order_mark_is_no_label(tmp_path: Path) -> None:
    path = tmp_path / "net.edgelist"
    path.write_text("\ufeff" + "".join(f"{rank} {rank + 1}\n" for rank in range(11)), encoding="utf-8")
    assert Topology.from_graph(path) == Topology.from_graph(nx.path_graph(12))
    path = tmp_path / "net.json"
    path.write_text('\ufeff{"nodes": [{"id": 0}, {"id": 1}], "edges": [{"source": 0, "target": 1}]}', encoding="utf-8")
    assert Topology.from_graph(path).world_size == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nodes": [{"id": 0}], "edges": [{"source": 0, "target": 7}]}, r"edges\[0\] has the target 7, .*not among"),
        ({"nodes": [{"id": 0}], "links": [{"source": 7, "target": 0}]}, r"links\[0\] has the source 7"),
        ({"nodes": [{"id": 0}], "edges": [{"source": 0}]}, r"edges\[0\] must be a mapping with source and target"),
        ({"nodes": 5, "edges": []}, r"nodes must be a list, got 5"),
        ({"nodes": [{"id": 0}], "edges": None}, r"edges must be a list, got None"),
        ({"nodes": [0, 1], "edges": [[0, 1]]}, r"nodes\[0\] must be a mapping with id, got 0"),
        ({"nodes": [{}], "edges": []}, r"nodes\[0\] must be a mapping with id, got \{\}"),
        ({"nodes": [{"id": 0}], "edges": [[0, 1]]}, r"edges\[0\] must be a mapping"),
        ({"nodes": [{"id": 0}, {"id": 0}], "edges": []}, r"nodes\[1\] repeats the id 0"),
        ({"nodes": [{"id": {}}], "edges": []}, r"nodes\[0\] has the id \{\}, which is no label"),
        ({"nodes": [{"id": 0}], "edges": [], "graph": 5}, r"graph must be a mapping of attributes, got 5"),
    ],
)
def test_node_link_data_that_is_none_is_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"no node-link data: {message}"):
        Topology.from_graph(data)


def test_labels_that_are_tuples_survive_node_link_data() -> None:
    grid = nx.grid_2d_graph(2, 3)
    assert Topology.from_graph(nx.node_link_data(grid, edges="edges")) == Topology.from_graph(grid)


def test_a_json_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"net\.json' does not hold a graph.*it is \[1, 2\]"):
        Topology.from_graph(path)


def test_paths_that_cannot_be_are_refused_briefly() -> None:
    with pytest.raises(ValueError, match="cannot be looked up") as caught:
        Topology.from_graph("a" * 5000 + ".json")
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="graph is an empty text; pass a path"):
        Topology.from_graph("")


def test_weights_of_none_and_long_labels_are_harmless() -> None:
    graph = nx.Graph([(0, 1, {"weight": None}), (1, 2)])
    assert Topology.from_graph(graph) == Topology.from_graph(nx.path_graph(3))
    long = "5" * 5000
    round_ = Topology.from_graph(nx.Graph([(long, "10"), ("10", "9"), ("-1", "9")])).round(0)
    assert [round_.peers(rank) for rank in range(4)] == [(1,), (0, 2), (1, 3), (2,)]
    with pytest.raises(ValueError, match="it must be a positive number"):
        Topology.from_graph(nx.Graph([(0, 1, {"weight": 10**400})]), "given")


def test_many_components_are_counted() -> None:
    with pytest.raises(ValueError, match=r"20000 components of 1, 1, 1, 1, 1, \.\.\. nodes") as caught:
        Topology.from_graph(nx.empty_graph(20000))
    assert len(str(caught.value)) < 300


def test_given_weights_with_wrong_sums_are_explained_in_the_users_terms() -> None:
    graph = nx.Graph([(0, 1, {"weight": 0.5}), (0, 0, {"weight": 0.2}), (1, 1, {"weight": 0.5})])
    with pytest.raises(ValueError, match=r"row 0 of .* sums to 0\.7; scale the edge weights") as caught:
        Topology.from_graph(graph, "given")
    assert "stochasticity" not in str(caught.value)


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


def test_families_without_weights_do_not_recommend_them() -> None:
    graph = nx.Graph([(0, 1, {"weight": 2.0}), (1, 2, {"weight": 3.0})])
    with pytest.warns(UserWarning, match="weights of graph are ignored: this family uses the edges alone") as seen:
        topologies.build("matchings", 3, graph=graph)
    assert not any("given" in str(warning.message) for warning in seen)
    loop = nx.Graph([(0, 1), (1, 1)])
    with pytest.warns(UserWarning, match="the family decides what a rank keeps"):
        topologies.build("matchings", 2, graph=loop)

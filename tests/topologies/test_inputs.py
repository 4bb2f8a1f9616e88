"""What users give by mistake: refused by name and value, never read in part and never taken for something else."""

import copy
import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies import Round, Topology, weighted_round
from topologies.serialization import from_dict

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


@pytest.mark.parametrize(("suffix", "write"), [(".graphml", nx.write_graphml), (".gexf", nx.write_gexf)])
def test_files_whose_edges_name_other_nodes_are_refused(suffix: str, write: Any, tmp_path: Path) -> None:
    path = tmp_path / f"net{suffix}"
    write(nx.path_graph(3), path)
    assert Topology.from_graph(path) == Topology.from_graph(nx.path_graph(3))
    path.write_text(path.read_text().replace('target="2"', 'target="7"'))
    with pytest.raises(ValueError, match="an edge has the target '7', which is not among the nodes"):
        Topology.from_graph(path)


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
        lambda: recorded["edges"][0].__delitem__("source"),
        lambda: recorded["nodes"][0].update(id=7),
        lambda: recorded["nodes"][0].setdefault("name", 7),
        lambda: recorded.__ior__({"edges": ()}),
        recorded.clear,
        recorded.popitem,
        lambda: recorded.pop("edges"),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert topology.to_json() == before
    topology.describe().options["graph"] = None
    for other in (
        Topology.from_json(before),
        pickle.loads(pickle.dumps(topology)),
        copy.deepcopy(topology),
        topologies.build("graph", 4, **topology.options),
    ):
        assert other == topology
        assert other.to_json() == before
    for copied in (copy.deepcopy(recorded), pickle.loads(pickle.dumps(recorded))):
        assert copied == recorded
        with pytest.raises(TypeError, match="read-only"):
            copied["edges"] = ()
    assert nx.utils.graphs_equal(nx.node_link_graph(recorded, edges="edges"), nx.star_graph(3))


def test_an_order_is_a_sequence() -> None:
    path = topologies.build("path", 4)
    for order in ({0: 3, 1: 0, 2: 1, 3: 2}, {0, 1, 2, 3}, None, np.eye(2), iter([0, 1, 2, 3])):
        with pytest.raises(TypeError, match="order must be a sequence of the 4 ranks"):
            path.permuted(order)  # type: ignore[arg-type]
    expected = path.permuted([3, 0, 1, 2])
    assert path.permuted((3, 0, 1, 2)) == path.permuted(np.array([3, 0, 1, 2])) == expected  # type: ignore[arg-type]


BAD_EDGES: list[tuple[Any, str]] = [
    ([(-1, 1)], "edges names rank -1, ranks go from 0 to 2"),
    ([(0, 10**30)], "edges names rank 1000000"),
    (None, "edges must be an array or a list of numbers, got None"),
    (nx.path_graph(3), r"\(Graph\); pass its edges"),
    ([(0, 1, 2)], r"edges must have the shape \[edges, 2\], got \[1, 3\]"),
    ([(0, 1), (2,)], "edges must be lists of the same length"),
    ([(0.7, 1.2)], "edges must be integers, got 0.7"),
    ([(0, 1), (True, 2)], "edges must be integers, got True"),
    ([("0", "1")], "edges must be integers, got '0'"),
]


@pytest.mark.parametrize(("edges", "message"), BAD_EDGES)
def test_edges_that_are_none_are_refused(edges: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        weighted_round(3, edges)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1], [0.5, 0.2]), r"weights must have the shape \[1\], one per edge.*got the shape \[2\]"),
        (([0], [1], 0.5, [1, 1]), r"self_weights must have the shape \[3\], one per rank"),
        (([[0]], [[1]], 0.5), r"of shape \[1, 1\]"),
        (([10**30], [1], 0.5), "targets names rank 1000000"),
        (([float("nan")], [1], 0.5), "targets must be integers, got nan"),
        (([0.9], [1.7], 0.5), "targets must be integers, got 0.9"),
        (([0], np.array([1.0]), 0.5), "sources must be integers, got 1.0"),
        (([True, 2], [0, 0], 0.5), "targets must be integers, got True"),
        ((["0"], [1], 0.5), "targets must be integers, got '0'"),
        (({0}, [1], 0.5), r"targets must be an array or a list of numbers, got \{0\}"),
        (([0], [1], "0.5"), "weights must be an array or a list of numbers, got '0.5'"),
        (([0], [1], ["0.5"]), "weights must be real numbers, got '0.5'"),
        (([0], [1], [None]), "weights must be real numbers, got None"),
        (([0, 1], [1, 0], [True, 0.5]), "weights must be real numbers, got True"),
        (([0], [1], 1j), "weights must be real numbers, got 1j"),
        (([0], [1], [10**400]), "that a float can hold"),
    ],
)
def test_lists_of_edges_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Round.from_edges(3, *arguments)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1], [2, 3]], "matrix must be lists of the same length"),
        ([["1", "0"], ["0", "1"]], "matrix must be real numbers, got '1'"),
        ([[1, 1j], [0, 1]], "matrix must be real numbers, got"),
        (None, "got None"),
        (nx.path_graph(2), "use Topology.from_graph"),
    ],
)
def test_matrices_that_are_none_are_refused(matrix: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Round.from_matrix(matrix)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "rows must be a list of mappings"),
        ([[0, 1], [1, 0]], r"rows\[0\] must be a mapping .* use Round.from_matrix"),
        ([{1: None}, {}], r"the weights in rows\[0\] must be real numbers, got None"),
        ([{}, {0: "0.5"}], r"the weights in rows\[1\] must be real numbers, got '0.5'"),
        ([{1.5: 0.5}, {0: 0.5}], r"a rank in rows\[0\] must be an integer of at least 0, got 1.5"),
        ([{0: 1.0}, {True: 1.0}], r"a rank in rows\[1\] must be an integer of at least 0, got True"),
        ([{"1": 0.5}, {}], r"a rank in rows\[0\] must be an integer"),
    ],
)
def test_rows_that_are_none_are_refused(rows: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Round.from_rows(rows)


def test_groups_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"groups\[0\] must be a list of ranks, got 0"):
        Round.from_groups(4, [0, 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="groups must be a list of groups of ranks, got None"):
        Round.from_groups(4, None)  # type: ignore[arg-type]


def test_all_kinds_of_exact_numbers_are_taken() -> None:
    expected = Round.from_edges(3, [0, 1], [1, 0], [0.5, 0.5])
    ranks = np.array([0, 1], dtype=np.uint8)
    assert Round.from_edges(3, ranks, ranks[::-1], Fraction(1, 2)) == expected  # type: ignore[arg-type]
    assert Round.from_rows([{np.int64(1): np.float32(0.5)}, {0: Fraction(1, 2)}, {}]) == expected  # type: ignore[dict-item]
    assert weighted_round(3, nx.path_graph(3).edges) == weighted_round(3, [(0, 1), (1, 2)])  # type: ignore[arg-type]
    assert weighted_round(2, []).is_identity


RING = {"name": "ring", "world_size": 4, "options": {}}
IDENTITY = {"name": "x", "world_size": 3, "stochasticity": "doubly", "rounds": [{"world_size": 3, "groups": []}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "a topology needs the keys .* got 5"),
        (RING | {"options": 5}, "options must be a mapping, got 5"),
        (RING | {"options": None}, "options must be a mapping, got None"),
        (RING | {"name": []}, r"name must be a text, got \[\]"),
        (IDENTITY | {"name": []}, r"name must be a text, got \[\]"),
        (IDENTITY | {"rounds": 5}, "rounds must be a list, got 5"),
        (IDENTITY | {"rounds": [5]}, "a round needs the keys .* got 5"),
        (IDENTITY | {"world_size": 4}, r"world_size is 4, but rounds\[0\] is for 3 ranks"),
        ({"phases": 5}, "phases must be a list, got 5"),
        ({"interleave": [RING]}, "interleave must hold two topologies, got 1"),
        ({"product": []}, "product must hold two topologies, got 0"),
        ({"product": 5}, "product must be a list, got 5"),
        ({"permuted": RING, "order": 5}, "order must be a list, got 5"),
    ],
)
def test_json_that_is_no_topology_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.from_json(json.dumps(data))


def test_what_is_nested_too_deeply_is_refused() -> None:
    data: dict[str, Any] = RING
    for _ in range(5000):
        data = {"permuted": data, "order": [0, 1, 2, 3]}
    with pytest.raises(ValueError, match="the topology is nested too deeply"):
        from_dict(Topology, data)

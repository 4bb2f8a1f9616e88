"""Edge colourings: every edge in exactly one matching, and how many matchings there are."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topologies.graphs import edge_colouring as module
from topologies.graphs.edge_colouring import edge_colouring


def largest_degree(graph: nx.Graph) -> int:
    return max(degree for _, degree in graph.degree)


def num_colours(graph: nx.Graph) -> int:
    """The number of matchings, after a check that they are one colouring in the promised form."""
    matchings = edge_colouring(graph.edges)
    found = [tuple(pair) for matching in matchings for pair in matching.tolist()]
    assert sorted(found) == sorted(tuple(sorted(edge)) for edge in graph.edges)
    for matching in matchings:
        assert matching.dtype == np.int64
        assert matching.size
        assert len(np.unique(matching)) == matching.size
        assert matching.tolist() == sorted(matching.tolist())
    return len(matchings)


@st.composite
def graphs(draw: st.DrawFn, bipartite: bool = False) -> nx.Graph:
    n = draw(st.integers(2, 14))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n) if not bipartite or (i + j) % 2]
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))
    return nx.Graph(chosen)


@settings(max_examples=60)
@given(graphs())
def test_edge_colouring_is_proper_with_at_most_one_colour_too_many(graph: nx.Graph) -> None:
    assert largest_degree(graph) <= num_colours(graph) <= largest_degree(graph) + 1


@settings(max_examples=60)
@given(graphs(bipartite=True))
def test_edge_colouring_of_a_bipartite_graph_is_optimal(graph: nx.Graph) -> None:
    assert num_colours(graph) == largest_degree(graph)


@settings(max_examples=60)
@given(graphs())
def test_edge_colouring_by_fans_alone_needs_one_colour_more_at_most(graph: nx.Graph) -> None:
    edges = module._sorted_edges(graph.edges)
    degree = largest_degree(graph)
    colouring = module._Colouring(int(edges.max()) + 1, degree + 1)
    for u, v in edges.tolist():
        colouring.join_by_fan(u, v)
    for node in graph:
        colours = [colouring.colour_of[node][other] for other in graph[node]]
        assert len(set(colours)) == len(colours)
        assert all(0 <= colour <= degree for colour in colours)
        assert colouring.free[node] == sum(1 << c for c in range(degree + 1) if c not in colours)


@pytest.mark.parametrize(
    ("graph", "colours"),
    [
        (nx.cycle_graph(9), 3),
        (nx.complete_graph(8), 7),
        (nx.complete_graph(23), 23),
        (nx.hypercube_graph(4), 4),
        (nx.complete_bipartite_graph(7, 7), 7),
        (nx.petersen_graph(), 4),  # the smallest cubic graph without bridges that needs 4
        (nx.icosahedral_graph(), 5),
        (nx.circulant_graph(9, [1, 2]), 5),  # regular of odd order: overfull
        (nx.karate_club_graph(), 17),
    ],
)
def test_edge_colouring_known_numbers(graph: nx.Graph, colours: int) -> None:
    assert num_colours(nx.convert_node_labels_to_integers(graph)) == colours


@pytest.mark.parametrize("degree", [3, 4, 10])
def test_edge_colouring_of_large_random_regular_graphs_is_optimal(degree: int) -> None:
    """These have a colouring with `degree` colours with overwhelming probability; the attempts find it."""
    assert num_colours(nx.random_regular_graph(degree, 1024, seed=3)) == degree


@settings(max_examples=60)
@given(graphs(), st.randoms(use_true_random=False))
def test_edge_colouring_depends_on_the_set_of_edges_alone(graph: nx.Graph, random: object) -> None:
    edges = [edge if random.random() < 0.5 else edge[::-1] for edge in graph.edges]  # type: ignore[attr-defined]
    random.shuffle(edges)  # type: ignore[attr-defined]
    for one, other in zip(edge_colouring(graph.edges), edge_colouring(edges), strict=True):
        np.testing.assert_array_equal(one, other)

"""Expanders are the graphs of networkx, made simple."""

import networkx as nx
import numpy as np
import pytest

import topologies

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

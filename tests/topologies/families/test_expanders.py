"""Expanders: known spectra, the graphs of networkx, and the sizes that exist."""

import math

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies.families.expanders import margulis_edges

PALEY = (5, 13, 17, 29, 37, 61, 101)
PRIMES = (2, 3, 5, 7, 11, 13, 23, 31, 61)


def adjacency(name: str, n: int) -> np.ndarray:
    matrix = topologies.build(name, n).round(0).matrix()
    np.fill_diagonal(matrix, 0.0)
    return (matrix != 0).astype(float)


def simplified(graph: nx.Graph) -> np.ndarray:
    matrix = nx.to_numpy_array(nx.Graph(graph), nodelist=sorted(graph))
    np.fill_diagonal(matrix, 0.0)
    return (matrix != 0).astype(float)


@pytest.mark.parametrize("p", PALEY)
def test_paley_has_the_spectrum_of_conference_graphs(p: int) -> None:
    half = (p - 1) // 2
    expected = [(-1 - math.sqrt(p)) / 2] * half + [(-1 + math.sqrt(p)) / 2] * half + [half]
    np.testing.assert_allclose(np.linalg.eigvalsh(adjacency("paley", p)), expected, rtol=0, atol=1e-10)
    slem = topologies.build("paley", p).describe().slem
    assert slem == pytest.approx((1 + math.sqrt(p)) / (1 + p), abs=1e-12)
    fastest = topologies.build("paley", p, weights="best_constant").describe().slem
    assert fastest == pytest.approx(1 / math.sqrt(p), abs=1e-12)


@pytest.mark.parametrize("p", PALEY)
def test_paley_joins_quadratic_residues(p: int) -> None:
    np.testing.assert_array_equal(adjacency("paley", p), simplified(nx.paley_graph(p).to_undirected()))
    residues = {x * x % p for x in range(1, p)}
    assert topologies.build("paley", p).round(0).peers(0) == tuple(sorted(residues))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 15, 20])
def test_margulis_multigraph_keeps_the_bound(m: int) -> None:
    edges = margulis_edges(m)
    counts = np.zeros((m * m, m * m))
    np.add.at(counts, (edges[:, 0], edges[:, 1]), 1)
    multigraph = counts + counts.T
    assert (multigraph.sum(axis=0) == 8).all()
    eigenvalues = np.linalg.eigvalsh(multigraph)
    assert eigenvalues[-1] == pytest.approx(8)
    if m > 1:
        assert max(eigenvalues[-2], -eigenvalues[0]) <= 5 * math.sqrt(2) + 1e-10
    reference = nx.to_numpy_array(nx.margulis_gabber_galil_graph(m), nodelist=sorted(np.ndindex(m, m)))
    np.fill_diagonal(reference, 2 * np.diagonal(reference))  # a loop counts once there, and at both of its ends here
    np.testing.assert_array_equal(multigraph, reference)


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8, 13])
def test_margulis_is_the_multigraph_made_simple(m: int) -> None:
    np.testing.assert_array_equal(adjacency("margulis", m * m), simplified(nx.margulis_gabber_galil_graph(m)))


@pytest.mark.parametrize("p", PRIMES)
def test_chordal_is_the_multigraph_made_simple(p: int) -> None:
    np.testing.assert_array_equal(adjacency("chordal", p), simplified(nx.chordal_cycle_graph(p)))

"""Weight schemes: known optima, their order, what they may hold, and what they refuse."""

import math
import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topologies import Topology, weighted_round
from topologies.analysis import slem
from topologies.graphs.edge_weights import SCHEMES
from topologies.graphs.spectrum import DENSE_WORLD_SIZE

#: What the solver leaves of an optimum.
SOLVER = 2e-6


def matrix(graph: nx.Graph, weights: str) -> np.ndarray:
    return Topology.from_graph(graph, weights).round(0).matrix()


def rate(graph: nx.Graph, weights: str) -> float:
    return slem(matrix(graph, weights))


def ring_rate(n: int) -> float:
    """W = I - alpha L with lambda_k = 2 - 2 cos(2 pi k / n)."""
    eigenvalues = [2 - 2 * math.cos(2 * math.pi * k / n) for k in range(1, n)]
    smallest, largest = min(eigenvalues), max(eigenvalues)
    return (largest - smallest) / (largest + smallest)


EDGE_TRANSITIVE = [
    *(pytest.param(nx.cycle_graph(n), ring_rate(n), id=f"ring-{n}") for n in (3, 4, 11)),
    *(pytest.param(nx.complete_graph(n), 0.0, id=f"complete-{n}") for n in (2, 6)),
    # L has the eigenvalues 0, 1 and n.
    pytest.param(nx.star_graph(8), 8 / 10, id="star"),
    pytest.param(nx.hypercube_graph(4), 3 / 5, id="hypercube"),
    # 0, a, b and a + b, where both sides have more than one rank.
    pytest.param(nx.complete_bipartite_graph(2, 5), 5 / 9, id="K2,5"),
    # 0, 2 and 5.
    pytest.param(nx.petersen_graph(), 3 / 7, id="petersen"),
]


@pytest.mark.parametrize(("graph", "expected"), EDGE_TRANSITIVE)
def test_best_constant_is_the_closed_form_and_fdla_no_better(graph: nx.Graph, expected: float) -> None:
    assert rate(graph, "best_constant") == pytest.approx(expected, abs=1e-12)
    assert rate(graph, "fdla") == pytest.approx(expected, abs=SOLVER)


@pytest.mark.parametrize("n", [2, 7])
def test_fmmc_on_a_path_is_one_half_on_every_edge(n: int) -> None:
    # Boyd, Diaconis, Sun and Xiao, "Fastest mixing Markov chain on a path", 2006.
    w = matrix(nx.path_graph(n), "fmmc")
    np.testing.assert_allclose(np.diagonal(w, 1), 0.5, rtol=0, atol=1e-3)  # flat around the optimum
    assert slem(w) == pytest.approx(math.cos(math.pi / n), abs=SOLVER)


@st.composite
def connected_graphs(draw: st.DrawFn) -> nx.Graph:
    """A random tree with some more edges."""
    n = draw(st.integers(2, 12))
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((draw(st.integers(0, rank - 1)), rank) for rank in range(1, n))
    extra = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=16))
    graph.add_edges_from((one, other) for one, other in extra if one != other)
    return graph


@pytest.mark.filterwarnings("ignore:weights='metropolis_hastings' never converges")
@settings(max_examples=25)
@given(connected_graphs())
def test_schemes_on_any_graph(graph: nx.Graph) -> None:
    n = len(graph)
    no_edge = nx.to_numpy_array(graph, nodelist=range(n)) + np.eye(n) == 0
    rates = {}
    for scheme in SCHEMES:
        topology = Topology.from_graph(graph, scheme)
        w = topology.round(0).matrix()
        if scheme in ("uniform", "push_sum") and not nx.is_regular(graph):
            assert topology.stochasticity == ("row" if scheme == "uniform" else "column")
            np.testing.assert_allclose(w.sum(axis=1 if scheme == "uniform" else 0), 1, rtol=0, atol=1e-14)
            continue
        assert topology.doubly_stochastic
        assert topology.symmetric
        np.testing.assert_array_equal(w, w.T)
        assert not w[no_edge].any()
        np.testing.assert_allclose(w.sum(axis=1), 1, rtol=0, atol=1e-15 * n)
        rates[scheme] = slem(w)
        if scheme in ("fdla", "fmmc"):
            np.testing.assert_array_equal(w.sum(axis=1), np.ones(n))
        if scheme not in ("best_constant", "fdla"):
            assert (w >= -1e-15).all()
    assert rates["fdla"] <= rates["fmmc"] + SOLVER
    assert rates["fdla"] <= rates["best_constant"] + SOLVER
    assert rates["fmmc"] <= min(rates[scheme] for scheme in ("metropolis", "lazy", "max_degree")) + SOLVER
    assert rates["best_constant"] <= rates["max_degree"] + 1e-12


@pytest.mark.parametrize(
    ("graph", "second", "largest"),
    [
        (nx.cycle_graph(4096), 2 - 2 * math.cos(2 * math.pi / 4096), 4.0),
        (nx.complete_bipartite_graph(20, 600), 20.0, 620.0),
    ],
    ids=["ring", "complete bipartite"],
)
def test_best_constant_of_large_graphs(graph: nx.Graph, second: float, largest: float) -> None:
    assert len(graph) > DENSE_WORLD_SIZE
    round_ = weighted_round(len(graph), list(graph.edges), "best_constant")
    weight = next(iter(round_.neighbours(1).values()))
    assert weight == pytest.approx(2 / (second + largest), rel=1e-10)


def test_push_sum_splits_what_a_rank_has() -> None:
    directed = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    topology = Topology.from_graph(directed, "push_sum")
    # Rank 0 sends to 1 and 2 and keeps a third; column j holds what rank j splits.
    thirds = [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(topology.round(0).matrix(), thirds, rtol=0, atol=1e-15)
    assert topology.stochasticity == "column"
    reverse = Topology.from_graph(directed.reverse(), "uniform").round(0).matrix()
    np.testing.assert_allclose(topology.round(0).matrix(), reverse.T, rtol=0, atol=1e-15)
    assert Topology.from_json(topology.to_json()) == topology


def test_missing_cvxpy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ImportError, match=r"'fdla' needs cvxpy.*clone.*pip install '\.\[weights\]'"):
        weighted_round(4, [(0, 1), (1, 2), (2, 3)], "fdla")


def test_fmmc_is_the_optimum_where_fdla_goes_below_zero() -> None:
    import cvxpy as cp

    graph = nx.connected_watts_strogatz_graph(9, 4, 0.4, seed=7)
    assert matrix(graph, "fdla")[~np.eye(len(graph), dtype=bool)].min() < -1e-3
    n = len(graph)
    w = cp.Variable((n, n), symmetric=True)
    apart = 1 - nx.to_numpy_array(graph, nodelist=range(n)) - np.eye(n)
    constraints = [w >= 0, cp.sum(w, axis=1) == 1, cp.multiply(apart, w) == 0]
    optimum = cp.Problem(cp.Minimize(cp.sigma_max(w - 1 / n)), constraints).solve(solver=cp.CLARABEL)
    assert rate(graph, "fmmc") == pytest.approx(optimum, abs=SOLVER)
    assert rate(graph, "fdla") < optimum - 1e-5

"""MATCHA: probabilities and step against closed forms, a semidefinite solver and all outcomes of a round."""

import math

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies.graphs.edge_colouring import edge_colouring
from topologies.graphs.matching_activation import Activation, activation
from topologies.graphs.spectrum import laplacian, lowest

pytestmark = pytest.mark.slow  # together


def activated(graph: nx.Graph, budget: float) -> Activation:
    return activation(len(graph), edge_colouring(graph.edges), budget)


def laplacians(n: int, matchings: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    graphs = []
    for matching in matchings:
        graph = nx.empty_graph(n)
        graph.add_edges_from(matching.tolist())
        graphs.append(nx.laplacian_matrix(graph).toarray().astype(float))
    return graphs


GRAPHS = {
    "wheel": nx.wheel_graph(7),
    "lollipop": nx.lollipop_graph(5, 4),
    "karate club": nx.karate_club_graph(),
    "ring": nx.cycle_graph(10),  # whose matchings are alike, and whose second eigenvalue is double
}
CASES = [pytest.param(graph, budget, id=f"{name}-{budget}") for name, graph in GRAPHS.items() for budget in (0.3, 0.6)]


@pytest.mark.parametrize(("graph", "budget"), CASES)
def test_probabilities_are_optimal(graph: nx.Graph, budget: float) -> None:
    """Against the semidefinite program, solved by CLARABEL."""
    import cvxpy

    found = activated(graph, budget)
    n, parts = len(graph), laplacians(len(graph), found.matchings)
    p, t = cvxpy.Variable(len(parts)), cvxpy.Variable()
    basis = np.linalg.svd(np.eye(n) - 1 / n)[0][:, :-1]  # of the vectors orthogonal to 1
    mixed = sum(p[j] * (basis.T @ part @ basis) for j, part in enumerate(parts)) - t * np.eye(n - 1)
    problem = cvxpy.Problem(cvxpy.Maximize(t), [mixed >> 0, p >= 0, p <= 1, cvxpy.sum(p) <= budget * len(parts)])
    problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-7, tol_gap_rel=1e-7, tol_feas=1e-7)
    assert problem.status == cvxpy.OPTIMAL
    assert found.connectivity == pytest.approx(problem.value, rel=1e-6)
    # Whatever the solver says, this is what the probabilities reach, and they are feasible.
    laplacian = np.tensordot(found.probabilities, parts, 1)
    assert found.connectivity == pytest.approx(np.linalg.eigvalsh(laplacian)[1], rel=1e-10)
    assert found.probabilities.min() >= 0
    assert found.probabilities.max() <= 1
    assert found.probabilities.sum() <= budget * len(parts) * (1 + 1e-12)


@pytest.mark.parametrize(("graph", "budget"), CASES)
def test_step_is_optimal(graph: nx.Graph, budget: float) -> None:
    found = activated(graph, budget)
    n, parts = len(graph), laplacians(len(graph), found.matchings)
    p = found.probabilities
    mean = np.tensordot(p, parts, 1)
    square = mean @ mean + 2 * np.tensordot(p * (1 - p), parts, 1)

    def norm(alpha: float) -> float:
        return float(np.linalg.norm(np.eye(n) - 2 * alpha * mean + alpha**2 * square - 1 / n, ord=2))

    assert norm(found.alpha) == pytest.approx(found.squared_rate, abs=1e-12)
    # A convex function: it is enough to look next to the point.
    for factor in (0.5, 0.99, 0.9999, 1.0001, 1.01, 2):
        assert norm(found.alpha * factor) >= found.squared_rate - 1e-12
    assert found.rate == math.sqrt(found.squared_rate)


def test_rounds_use_whole_matchings_as_often_as_they_should() -> None:
    sampled = topologies.build("matcha", 10, graph=nx.lollipop_graph(5, 5), budget=0.4, seed=3).make_round
    found = sampled.activation
    parts = laplacians(10, found.matchings)
    counts = np.zeros(len(parts))
    num_rounds = 1000
    for t in range(num_rounds):
        round_ = sampled(t)
        active = [
            round_.neighbours(int(matching[0, 0])).get(int(matching[0, 1]), 0) != 0 for matching in found.matchings
        ]
        counts += active
        if t < 50:
            expected = np.eye(10) - found.alpha * np.tensordot(np.array(active, dtype=float), parts, 1)
            np.testing.assert_allclose(round_.matrix(), expected, rtol=0, atol=1e-14)
    spread = np.sqrt(found.probabilities * (1 - found.probabilities) / num_rounds)
    assert (np.abs(counts / num_rounds - found.probabilities) <= 5 * spread + 1e-6).all()


@pytest.mark.parametrize("floor", [0.0, -4.0])
def test_lowest_finds_the_low_end_whatever_the_guess(floor: float) -> None:
    """Of minus a path's Laplacian, whose lowest eigenvalues are close together and far below 0."""
    edges = np.stack((np.arange(499), np.arange(1, 500)), axis=1)
    values, vectors = lowest(-laplacian(500, edges, np.ones(499)), 3, floor=floor)
    expected = [-2 + 2 * math.cos(math.pi * k / 500) for k in (499, 498, 497)]
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(vectors.sum(axis=0), 0, atol=1e-8)

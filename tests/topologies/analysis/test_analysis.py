"""The analysis against dense numpy, closed forms, and at sizes for sparse methods only; what describe() says of it."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
from contracts import CONTRACTS
from hypothesis import given, settings
from hypothesis import strategies as st

import topologies
from topologies import Round, Topology, analysis
from topologies.analysis import disagreement

SMALL = [*((name, {}) for name in ("ring", "star", "directed_ring", "de_bruijn", "one_peer_ring")), ("base", {"k": 2})]


def dense(topology: Topology, num_rounds: int, start: int = 0) -> np.ndarray:
    mixed = np.eye(topology.world_size)
    for t in range(start, start + num_rounds):
        mixed = topology.round(t).matrix() @ mixed
    return mixed


def error(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def topologies_of(n: int) -> list[Topology]:
    return [found for name in topologies.available() for found in topologies.variants(name, n)]


@pytest.fixture
def sparse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small sizes go the way of large ones."""
    for module in (disagreement, analysis.consensus):
        monkeypatch.setattr(module, "MAX_DENSE_SPECTRUM", 4)


@pytest.mark.parametrize("topology", topologies_of(8), ids=repr)
def test_errors_are_norms_of_products(topology: Topology) -> None:
    for start in (0, 1, 5):
        errors = analysis.consensus_errors(topology, 7, start=start)
        expected = [error(dense(topology, k, start)) for k in range(8)]
        np.testing.assert_allclose(errors, expected, atol=1e-10)
    period = topology.period or 64
    assert analysis.beta(topology) == pytest.approx(error(dense(topology, period)), abs=1e-10)
    assert analysis.beta(topology, 3, start=2) == pytest.approx(error(dense(topology, 3, 2)), abs=1e-10)


@pytest.mark.parametrize("topology", topologies_of(9), ids=repr)
def test_rounds_to_is_the_first_round_below(topology: Topology) -> None:
    for start, tolerance in ((None, 0.3), (3, 0.01)):
        needed = analysis.rounds_to(topology, tolerance, start=start)
        assert error(dense(topology, needed, start or 0)) <= tolerance * (1 + 1e-9)
        assert error(dense(topology, needed - 1, start or 0)) > tolerance


@pytest.mark.parametrize("n", range(1, 9))
def test_the_rate_is_that_of_the_product(n: int) -> None:
    for topology in topologies_of(n):
        rate = analysis.consensus_rate(topology)
        left = [error(dense(topology, k)) for k in range(33)]
        # One round takes what is far more than rounding to nothing.
        ends = n == 1 or any(before > 1e-9 and after < 1e-14 for before, after in itertools.pairwise(left))
        assert (rate == 0.0) == ends, topology
        if rate == 0.0:
            assert analysis.rate_per_byte(topology) == 0.0 or n == 1, topology
        elif topology.period is not None:
            radius = float(np.abs(np.linalg.eigvals(dense(topology, topology.period) - 1 / n)).max())
            assert rate == pytest.approx(radius ** (1 / topology.period), abs=1e-9), topology
        else:
            sampled = next(k for k in reversed(range(33)) if left[k] > 1e-10)
            assert rate == pytest.approx(left[sampled] ** (1 / sampled), rel=0.2), topology
        assert rate < 1 - 1e-6, topology  # 1 says that they never agree, and these do


@pytest.mark.parametrize("n", [400, 1500])
def test_many_ranks_that_agree_by_one_late_round(n: int) -> None:
    whole, none = Round.from_groups(n, [range(n)]), Round.identity(n)
    assert analysis.consensus_rate(Topology.from_function(lambda t: whole if t == 40 else none)) == 0.0
    assert analysis.consensus_rate(Topology.from_function(lambda _: none)) == pytest.approx(1.0)


def test_slem_is_the_second_largest_modulus() -> None:
    swap = Topology.from_rounds([Round.from_matrix([[0, 1], [1, 0]])])
    assert analysis.slem(swap) == pytest.approx(1.0)
    assert analysis.spectral_gap(swap) == pytest.approx(0.0)
    assert analysis.consensus_rate(swap) == pytest.approx(1.0)
    assert analysis.rounds_to(swap, 0.5) is None
    negative = np.array([[0.1, 0.9], [0.9, 0.1]])
    assert analysis.slem(negative) == analysis.slem(Round.from_matrix(negative)) == pytest.approx(0.8)
    assert analysis.slem(topologies.build("complete", 1)) == 0.0
    # Of rows that sum to 1, the eigenvalue 1 is left out.
    matrix = np.array([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [0, 1, 0]])
    moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
    assert analysis.slem(matrix) == pytest.approx(moduli[-2])
    assert analysis.slem(matrix.T) == pytest.approx(moduli[-2])


def test_rounds_that_enlarge_a_disagreement_hide_no_earlier_one() -> None:
    def scaling(factor: float) -> Round:
        return Round.from_matrix([[(1 + factor) / 2, (1 - factor) / 2], [(1 - factor) / 2, (1 + factor) / 2]])

    topology = Topology.from_rounds([scaling(0.1), scaling(5.0)])
    np.testing.assert_allclose(analysis.consensus_errors(topology, 4), [1, 0.1, 0.5, 0.05, 0.25])
    assert analysis.rounds_to(topology, 0.06) == 3
    assert analysis.rounds_to(topology, 0.02) == 7


@pytest.mark.usefixtures("sparse_only")
@pytest.mark.parametrize(("name", "options"), SMALL)
def test_sparse_methods_agree_with_dense_ones(name: str, options: dict[str, int]) -> None:
    topology = topologies.build(name, 64, **options)
    period = topology.period
    assert analysis.beta(topology) == pytest.approx(error(dense(topology, period)), abs=1e-9)
    if topology.exact_after is None:
        radius = np.abs(np.linalg.eigvals(dense(topology, period) - 1 / 64)).max()
        assert analysis.consensus_rate(topology) == pytest.approx(radius ** (1 / period), abs=1e-9)
        needed = analysis.rounds_to(topology, 0.01)
        # The asymptotic rate counts the rounds of one matrix that is not normal, or of several, only roughly.
        exact = next(k for k in range(1, 10_000) if error(np.linalg.matrix_power(dense(topology, period), k)) <= 0.01)
        assert needed == pytest.approx(exact * period, rel=0.01)


@pytest.mark.parametrize(
    "name", ["ring", "directed_ring", "path", "star", "torus", "hypercube", "exponential", "complete"]
)
def test_known_spectra_at_4096(name: str) -> None:
    (contract,) = (each for each in CONTRACTS if each.name == name)
    assert analysis.slem(topologies.build(name, 4096)) == pytest.approx(contract.slem(4096), abs=1e-11)


def test_push_sum_is_judged_by_its_ratios() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    column = np.zeros((3, 3))
    for j in range(3):
        for i in [*graph.successors(j), j]:
            column[i, j] = 1 / (1 + graph.out_degree(j))
    topology = Topology.from_rounds([Round.from_matrix(column)], stochasticity="column")
    ratios = np.linalg.matrix_power(column, 30)
    ratios /= ratios.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(analysis.consensus_errors(topology, 30)[30], error(ratios), atol=1e-9)
    needed = analysis.rounds_to(topology, 1e-3)
    for k, within in ((needed, True), (needed - 1, False)):
        ratios = np.linalg.matrix_power(column, k)
        assert (error(ratios / ratios.sum(axis=1, keepdims=True)) <= 1e-3) is within


@pytest.mark.parametrize("graph", [nx.star_graph(449), nx.barabasi_albert_graph(450, 3, seed=1), nx.path_graph(450)])
def test_many_ranks_with_a_bias_never_get_there(graph: nx.Graph) -> None:
    topology = Topology.from_graph(graph, "uniform")
    degrees = np.array([degree + 1 for _, degree in sorted(graph.degree)], dtype=float)
    stationary = degrees / degrees.sum()  # a walk is reversible: it rests in proportion to the degrees
    assert analysis.bias(topology) == pytest.approx(np.linalg.norm(stationary - 1 / 450) * math.sqrt(450), abs=1e-9)
    assert analysis.rounds_to(topology, 0.01) is None
    assert topology.describe().rounds_to_tolerance is None


def test_a_bias_within_the_tolerance_is_agreed_on() -> None:
    matrix = np.full((3, 3), 1 / 3) + 1e-4 * np.outer(np.ones(3), [1, -1, 0])
    topology = Topology.from_rounds([Round.from_matrix(matrix)], stochasticity="row")
    assert 0 < analysis.bias(topology) < 0.01
    assert analysis.rounds_to(topology, 0.01) == 1
    assert analysis.bias(topologies.build("ring", 5)) == 0.0


@pytest.mark.parametrize("n", [60, 450])
def test_a_start_in_the_warm_up_counts_it(n: int) -> None:
    complete, ring = topologies.build("complete", n), topologies.build("ring", n)
    assert analysis.rounds_to(complete.then(ring, after=2), 0.1, start=0) == 1
    assert analysis.rounds_to(complete.every(4).then(ring.every(3), after=9), 0.1, start=0) == 4
    slow = analysis.rounds_to(ring.then(ring, after=3), 0.1, start=0)
    assert slow == analysis.rounds_to(ring, 0.1)


def test_another_starting_round() -> None:
    topology = topologies.build("alternating_exp_ring", 8, local_size=2)
    for start in range(8):
        first = next(k for k in range(1, 20) if error(dense(topology, k, start)) < 1e-12)
        assert analysis.exact_after(topology, start=start) == first
    warm = topologies.build("ring", 8).then(topology.every(3), after=5)
    for start in (0, 3, 5, 9, 18):
        first = next(k for k in range(1, 60) if error(dense(warm, k, start)) < 1e-12)
        assert analysis.exact_after(warm, start=start) == first
        assert analysis.rounds_to(warm, 1e-6, start=start) == first


@pytest.mark.parametrize("topology", topologies_of(9), ids=repr)
def test_connectivity_and_diameter(topology: Topology) -> None:
    union = nx.DiGraph()
    union.add_nodes_from(range(topology.world_size))
    for t in range(topology.period or 16):
        union.add_edges_from(topology.round(t).graph.edges)
    assert analysis.connected(topology) == nx.is_strongly_connected(union)
    assert analysis.diameter(topology) == nx.diameter(union)


@settings(max_examples=60)
@given(st.integers(2, 90), st.integers(0, 2**32), st.booleans())
def test_the_diameter_of_random_graphs(n: int, seed: int, directed: bool) -> None:
    graph = nx.gnp_random_graph(n, 3 / n, seed=seed, directed=directed)
    edges = list(graph.edges) + ([] if directed else [(b, a) for a, b in graph.edges])
    readers, senders = [b for _, b in edges], [a for a, _ in edges]
    round_ = Round.from_edges(n, readers, senders, 1e-3)
    topology = Topology.from_rounds([round_], stochasticity="row")
    together = nx.is_strongly_connected(graph) if directed else nx.is_connected(graph)
    assert analysis.connected(topology) is together
    assert analysis.diameter(topology) == (nx.diameter(graph) if together else None)


def test_sums_prove_what_they_are() -> None:
    assert analysis.sums(topologies.build("star", 7)).proven == "doubly"
    rows = Round.from_rows([{1: 0.5}, {}])
    assert analysis.sums([rows]).proven == "row"
    assert analysis.sums([Round.from_matrix(rows.matrix().T)]).proven == "column"
    odd = Round.from_matrix([[0.5, 0.6], [0.5, 0.5]])
    found = analysis.sums([rows, odd])
    assert found.proven is None
    assert (found.rows, found.columns, found.smallest_weight) == (pytest.approx(0.1), 0.5, 0.0)
    assert analysis.sums([Round.from_matrix([[1.5, -0.5], [-0.5, 1.5]])]).smallest_weight == -0.5
    assert analysis.sums(topologies.build("complete", 4)).smallest_weight == 0.25


def test_traffic_of_groups() -> None:
    found = analysis.traffic(topologies.build("local_global", 12, local_size=3), local_size=3)
    inside, across = found.rounds
    np.testing.assert_allclose(inside.sent, 4 / 3)  # 2 (g - 1) / g
    np.testing.assert_allclose(across.sent, 3 / 2)
    assert (inside.steps, across.steps) == (0, 6)
    assert inside.busiest_node == 0.0
    np.testing.assert_allclose(across.sent_by_node, 3 * 3 / 2)
    np.testing.assert_allclose(across.received_by_node, 3 * 3 / 2)
    assert found.num_communicators == 4 + 3
    assert found.network_bytes == 4 * 4.5 / 2
    assert found.max_node_bytes == 4.5


def test_the_text_is_one_aligned_page() -> None:
    text = str(topologies.build("local_global", 12, local_size=3).describe())
    assert text == "\n".join(
        [
            "topology        local_global (local_size=3)",
            "world size      12",
            "period          2 rounds",
            "measured over   one period",
            "degree          at most 3 sends and 3 receives per rank and round",
            "messages        2.5 per rank and round on average, point to point",
            "bytes           1.417 x the model per rank and round on average",
            "uniform groups  yes: every round can run as small all-reduces",
            "communicators   7 for these",
            "connected       yes",
            "diameter        2 edges",
            "stochastic      doubly, largest deviation 0.0e+00",
            "symmetric       yes",
            "SLEM            only defined for period 1",
            "spectral gap    only defined for period 1",
            "beta            0 = ||product - J||",
            "consensus rate  0 per round in the long run",
            "rounds to 1 %   2 from the worst disagreement",
            "exact after     2 rounds",
        ]
    )


def test_sends_and_receives_differ() -> None:
    # Everybody reads rank 0, which reads rank 1.
    rows = [{1: 0.5}, {0: 0.5}, {0: 0.5}, {0: 0.5}]
    found = Topology.from_rounds([Round.from_rows(rows)], stochasticity="row").describe()
    assert (found.max_sends, found.max_receives) == (3, 1)
    assert not found.connected  # nobody ever reads ranks 2 and 3
    assert found.largest_deviation == 0.0


def test_a_schedule_without_a_period_is_sampled() -> None:
    found = topologies.build("random_matching", 8).describe()
    assert (found.num_rounds, found.exact_after, found.symmetric) == (16, None, True)
    product = analysis.product(topologies.build("random_matching", 8), 16)
    assert found.beta == pytest.approx(np.linalg.norm(product - 1 / 8, 2))
    assert "measured over   the first 16 rounds" in str(found)
    assert "not promised: no period" in str(found)


def test_the_deviation_is_measured() -> None:
    round_ = Round.from_matrix([[0.5, 0.5 + 1e-11], [0.5, 0.5]])
    assert Topology.from_rounds([round_]).describe().largest_deviation == pytest.approx(1e-11, rel=1e-3)

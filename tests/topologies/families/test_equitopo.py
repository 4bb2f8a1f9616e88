"""EquiTopo: matrices by definition, the walk of the matching, hops, and expected rates."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
from topologies import Topology
from topologies.families.equitopo import partner_in_walk


def shift(n: int, hop: int) -> np.ndarray:
    """P with (P x)_i = x_(i + hop mod n)."""
    return np.roll(np.eye(n), hop, axis=1)


def basis(n: int, permutation: np.ndarray) -> np.ndarray:
    return np.eye(n) / n + (n - 1) / n * permutation


def walk(n: int, hop: int, start: int = 0) -> dict[int, int]:
    """The definition, word by word."""
    partner: dict[int, int] = {}
    for step in range(n):
        i = (start + step) % n
        j = (i + hop) % n
        if i not in partner and j not in partner:
            partner[i], partner[j] = j, i
    return partner


def swaps(n: int, partner: dict[int, int]) -> np.ndarray:
    return np.eye(n)[[partner.get(i, i) for i in range(n)]]


def one_round_per_hop(n: int, **options: object) -> dict[int, np.ndarray]:
    topology = topologies.build("equi_dyn", n, directed=True, **options)
    found: dict[int, np.ndarray] = {}
    for t in range(60 * n):
        [source] = topology.round(t).neighbours(0)
        found.setdefault(source, topology.round(t).matrix())
    return found


@pytest.mark.parametrize("n", range(2, 48))
def test_partners_are_those_of_the_walk(n: int) -> None:
    for hop in range(1, n):
        partner = walk(n, hop)
        assert [partner_in_walk(n, hop, rank) for rank in range(n)] == [partner.get(rank) for rank in range(n)], hop


@given(st.integers(2, 400), st.data())
def test_partners_are_those_of_the_walk_from_any_start(n: int, data: st.DataObject) -> None:
    hop, start = data.draw(st.integers(1, n - 1)), data.draw(st.integers(0, n - 1))
    partner = walk(n, hop, start)
    for rank in range(n):
        found = partner_in_walk(n, hop, (rank - start) % n)
        assert (None if found is None else (found + start) % n) == partner.get(rank)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 10, 16])
@pytest.mark.parametrize("eta", [0.5, 0.2, 1])
def test_equi_dyn_by_definition(n: int, eta: float) -> None:
    both = [topologies.build("equi_dyn", n, seed=3, directed=directed, eta=eta) for directed in (False, True)]
    for t in range(12):
        generator = np.random.default_rng((3, t))
        hop, start = int(generator.integers(1, n)), int(generator.integers(n))
        for topology, permutation in zip(both, (swaps(n, walk(n, hop, start)), shift(n, hop)), strict=True):
            expected = (1 - eta) * np.eye(n) + eta * basis(n, permutation)
            np.testing.assert_allclose(topology.round(t).matrix(), expected, rtol=0, atol=1e-15)
            for rank in range(n):
                reads = topology.round(t).neighbours(rank)
                assert reads == pytest.approx({j: w for j, w in enumerate(expected[rank]) if w and j != rank})
                assert topology.round(t).targets(rank) == tuple(
                    np.flatnonzero(expected[:, rank] * (np.arange(n) != rank))
                )


@pytest.mark.parametrize("n", [2, 3, 5, 12, 33])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_equi_static_is_the_mean_of_its_circulants(n: int, m: int) -> None:
    for seed in range(4):
        hops = np.random.default_rng((seed,)).integers(1, n, size=m).tolist()
        mean = np.mean([basis(n, shift(n, hop)) for hop in hops], axis=0)
        directed = topologies.build("equi_static", n, m=m, seed=seed, directed=True).round(0)
        np.testing.assert_allclose(directed.matrix(), mean, rtol=0, atol=1e-15)
        assert len(directed.neighbours(0)) == len(set(hops))
        undirected = topologies.build("equi_static", n, m=m, seed=seed).round(0)
        np.testing.assert_allclose(undirected.matrix(), (mean + mean.T) / 2, rtol=0, atol=1e-15)
        assert undirected.is_symmetric


def test_equal_and_opposite_hops_add_up() -> None:
    assert topologies.build("equi_static", 2, m=3, directed=True).round(0).neighbours(0) == pytest.approx({1: 0.5})
    assert topologies.build("equi_static", 2).round(0).neighbours(0) == {1: 0.5}
    # All hops of three ranks are 1 or 2: 50 of them fall on two neighbours.
    reads = topologies.build("equi_static", 3, m=50, seed=1, directed=True).round(0).neighbours(0)
    ones = int((np.random.default_rng((1,)).integers(1, 3, size=50) == 1).sum())
    assert 0 < ones < 50
    assert reads == pytest.approx({1: ones / 75, 2: (50 - ones) / 75}, abs=1e-15)
    assert topologies.build("equi_static", 3, m=50, seed=1).round(0).neighbours(0) == pytest.approx(
        {1: 1 / 3, 2: 1 / 3}
    )


def test_default_number_of_hops_is_recorded() -> None:
    assert dict(topologies.build("equi_static", 33).options) == {"m": 6, "seed": 0, "directed": False}
    assert topologies.build("equi_static", 33) == topologies.build("equi_static", 33, m=6)
    assert topologies.build("equi_static", 2).options["m"] == 1


@pytest.mark.parametrize("eta", [0.5, 0.3])
@pytest.mark.parametrize("n", [2, 3, 7, 10])
def test_expected_squared_rate_of_directed_rounds(n: int, eta: float) -> None:
    """E ||W x||^2 over all hops, for x of mean 0: the square of the rate, as the paper prints it."""
    matrices = one_round_per_hop(n, eta=eta)
    assert sorted(matrices) == list(range(1, n))
    squared = np.mean([matrix.T @ matrix for matrix in matrices.values()], axis=0)
    contraction = (1 - eta) ** 2 + eta**2 * (1 - 2 / n)
    off_mean = np.eye(n) - 1 / n
    np.testing.assert_allclose(squared - 1 / n, contraction * off_mean, rtol=0, atol=1e-14)
    # No single hop is that good for all x: hop 1 alone is a lazy ring.
    if n > 3:
        assert np.linalg.norm(matrices[1] - 1 / n, 2) ** 2 > contraction + 0.1


@pytest.mark.parametrize("n", [3, 8, 17, 32])
def test_expected_squared_rate_of_undirected_rounds_is_bounded(n: int) -> None:
    total = np.zeros((n, n))
    for hop in range(1, n):
        for start in range(n):
            matrix = np.eye(n) / 2 + basis(n, swaps(n, walk(n, hop, start))) / 2
            total += matrix @ matrix
    assert np.linalg.eigvalsh(total / (n * (n - 1)) - 1 / n).max() < 0.6


def test_expected_squared_rate_of_static_rounds() -> None:
    """One hop: 1 - 2/n. The mean of m independent ones, each of mean J: a m-th of that."""
    n, m, draws = 6, 3, 600
    squares = []
    for seed in range(draws):
        deviation = topologies.build("equi_static", n, m=m, seed=seed, directed=True).round(0).matrix() - 1 / n
        squares.append(np.linalg.norm(deviation) ** 2 / (n - 1))
    assert np.mean(squares) == pytest.approx((1 - 2 / n) / m, abs=4 * np.std(squares) / draws**0.5)
    assert np.std(squares) > 0


def test_many_hops_bring_a_rate_that_does_not_depend_on_the_size() -> None:
    for n in (64, 128, 256, 4096):
        round_ = topologies.build("equi_static", n, m=3 * (n - 1).bit_length()).round(0)
        first = np.zeros(n)
        first[[0, *round_.neighbours(0)]] = [round_.self_weight(0), *round_.neighbours(0).values()]
        # A circulant is normal, and its eigenvalues are the Fourier transform of a row: the second largest modulus.
        moduli = np.sort(np.abs(np.fft.fft(first)))
        assert moduli[-1] == pytest.approx(1, abs=1e-12)
        assert moduli[-2] < 0.75, n
        if n == 64:
            assert np.linalg.norm(round_.matrix() - 1 / n, 2) == pytest.approx(moduli[-2], abs=1e-10)


def test_hops_are_uniform() -> None:
    topology = topologies.build("equi_dyn", 5, directed=True)
    counts = Counter(next(iter(topology.round(t).neighbours(0))) for t in range(2000))
    assert sorted(counts) == [1, 2, 3, 4]
    assert all(abs(count - 500) < 100 for count in counts.values())  # 5 standard deviations
    drawn = topologies.build("equi_static", 5, m=4000, directed=True).round(0).neighbours(0)
    assert list(drawn) == [1, 2, 3, 4]
    assert all(abs(weight - 0.2) < 0.03 for weight in drawn.values())


def test_every_start_of_the_walk_occurs() -> None:
    """On three ranks any hop pairs two of them; who is idle depends on the start."""
    topology = topologies.build("equi_dyn", 3)
    idle = Counter(rank for t in range(300) for rank in range(3) if not topology.round(t).neighbours(rank))
    assert sum(idle.values()) == 300
    assert min(idle.values()) > 60


def test_a_seed_names_one_schedule() -> None:
    """Frozen: a change here changes what a seed means, and every run that is to be reproduced."""
    undirected = topologies.build("equi_dyn", 8, seed=0)
    directed = topologies.build("equi_dyn", 8, seed=0, directed=True)
    assert [undirected.round(t).groups for t in (0, 1000)] == [
        ((0, 2), (1, 7), (3, 5), (4, 6)),
        ((0, 5), (1,), (2,), (3, 6), (4, 7)),
    ]
    assert [list(directed.round(t).neighbours(0)) for t in (0, 1, 2, 1000)] == [[6], [4], [7], [3]]
    assert list(topologies.build("equi_static", 64, directed=True).round(0).neighbours(0)) == [3, 17, 20, 33, 41, 54]
    walked = topologies.build("equi_dyn", 9, seed=2)
    for t in range(100):
        walked.round(t)
    assert walked.round(1000) == topologies.build("equi_dyn", 9, seed=2).round(1000)


@pytest.mark.parametrize("n", [1_000_003, 1_000_000])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("name", ["equi_dyn", "equi_static"])
def test_a_rank_among_a_million(name: str, directed: bool, n: int) -> None:
    topology = topologies.build(name, n, directed=directed)
    for t in range(5):
        round_ = topology.round(t)
        for rank in (0, 1, 777_777, n - 1):
            row = round_.neighbours(rank)
            assert round_.self_weight(rank) + sum(row.values()) == pytest.approx(1, abs=1e-14)
            assert all(rank in round_.targets(other) for other in row)
            if not directed:
                assert all(round_.neighbours(other)[rank] == weight for other, weight in row.items())
        assert "explicit" not in vars(round_._storage)


def test_a_cluster_keeps_its_mean() -> None:
    state = np.random.default_rng(0).normal(size=4096)
    mean, spread = state.mean(), np.linalg.norm(state - state.mean())
    topology = topologies.build("equi_dyn", 4096, seed=1)
    for t in range(20):
        state = topology.round(t).mix(state)
    assert state.mean() == pytest.approx(mean, abs=1e-14)
    # 20 rounds at a squared rate of 0.57.
    assert np.linalg.norm(state - mean) / spread < 0.65**10


@pytest.mark.parametrize("name", ["equi_static", "equi_dyn"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": "a"}, TypeError, "seed must be an integer"),
        ({"directed": 1}, TypeError, r"directed of topology 'equi_\w+' must be True or False, got 1 \(int\)"),
        ({"directed": "no"}, TypeError, "must be True or False, got 'no'"),
    ],
)
def test_refusals(name: str, options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        topologies.build(name, 6, **options)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("equi_static", {"m": 0}, ValueError, "m must be at least 1, got 0"),
        ("equi_static", {"m": 1.5}, TypeError, "m must be an integer"),
        ("equi_dyn", {"eta": 0}, ValueError, "eta must be above 0 and at most 1, got 0"),
        ("equi_dyn", {"eta": 1.1}, ValueError, "got 1.1"),
        ("equi_dyn", {"eta": float("nan")}, ValueError, "got nan"),
        ("equi_dyn", {"eta": "half"}, TypeError, r"eta must be a number above 0 and at most 1, got 'half' \(str\)"),
        ("equi_dyn", {"eta": True}, TypeError, "got True"),
    ],
)
def test_refusals_of_single_options(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        topologies.build(name, 6, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("equi_static", {"m": 2, "directed": np.True_}), ("equi_dyn", {"eta": np.float64(0.25), "seed": np.int64(4)})],
)
def test_json_round_trip(name: str, options: dict[str, object]) -> None:
    topology = topologies.build(name, 11, **options)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert all(again.round(t) == topology.round(t) for t in range(5))

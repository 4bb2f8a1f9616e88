"""EquiTopo: matrices by definition, the walk of the matching, hops, and expected rates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
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
        partner = walk(n, hop, start)
        swaps = np.eye(n)[[partner.get(i, i) for i in range(n)]]
        for topology, permutation in zip(both, (swaps, shift(n, hop)), strict=True):
            expected = (1 - eta) * np.eye(n) + eta * basis(n, permutation)
            np.testing.assert_allclose(topology.round(t).matrix(), expected, rtol=0, atol=1e-15)


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

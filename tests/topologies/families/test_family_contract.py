"""One contract for every family: what it states about itself in contracts.py, for every size from 1 to 40."""

import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
from contracts import CONTRACTS, NEVER, SIZES, TOLERANCE, UNPROMISED, Contract, tau

import topologies
from topologies import Topology

CASES = [
    pytest.param(contract, options, id=f"{contract.name}-{number}")
    for contract in CONTRACTS
    for number, options in enumerate(contract.options)
]

quiet = pytest.mark.filterwarnings("ignore:weights='metropolis_hastings' never converges")


def served_sizes(contract: Contract, options: dict[str, Any]) -> list[int]:
    return [n for n in (*SIZES, *contract.more_sizes) if n > 1 and contract.serves(n, **options)]


def dense_product(topology: Topology, num_rounds: int) -> np.ndarray:
    mixed = np.eye(topology.world_size)
    for t in range(num_rounds):
        mixed = topology.round(t).matrix() @ mixed
    return mixed


def test_every_registered_family_has_a_row() -> None:
    assert sorted(contract.name for contract in CONTRACTS) == list(topologies.available())


@pytest.mark.parametrize(("contract", "options"), CASES)
def test_a_single_rank_is_one_identity_round(contract: Contract, options: dict[str, Any]) -> None:
    topology = topologies.build(contract.name, 1, **options)
    assert topology.world_size == topology.period == topology.exact_after == 1
    assert topology.round(0).is_identity
    assert topology.round(0).groups == ((0,),)
    assert topology.round(5).peers(0) == ()
    assert topology.symmetric
    assert topology.doubly_stochastic
    assert topology.describe().max_sends == 0
    assert Topology.from_json(topology.to_json()) == topology


@quiet
@pytest.mark.parametrize(("contract", "options"), CASES)
def test_period_degree_sums_and_symmetry(contract: Contract, options: dict[str, Any]) -> None:
    assert served_sizes(contract, options)
    for n in served_sizes(contract, options):
        topology = topologies.build(contract.name, n, **options)
        assert topology.name == contract.name
        assert topology.world_size == n
        assert topology.period == contract.period(n, **options), n
        assert topology.stochasticity == contract.stochasticity(n, **options), n
        num_rounds = topology.period or 6
        degrees = []
        for t in range(num_rounds):
            round_ = topology.round(t)
            matrix = round_.matrix()
            assert matrix.shape == (n, n)
            assert matrix.dtype == np.float64
            if (negative := contract.negative_weights(n, **options)) is not None:
                assert bool((matrix < 0).any()) is negative, (n, t)
            for axis, kind in ((1, "row"), (0, "column")):
                if contract.stochasticity(n, **options) in ("doubly", kind):
                    np.testing.assert_allclose(matrix.sum(axis=axis), 1, rtol=0, atol=1e-15 * n)
                else:
                    assert np.abs(matrix.sum(axis=axis) - 1).max() > TOLERANCE
            if contract.uniform_groups:
                assert round_.uniform_groups == round_.groups, (n, t)
            off_diagonal = matrix - np.diag(np.diag(matrix))
            degrees.append(max((off_diagonal != 0).sum(axis=1).max(), (off_diagonal != 0).sum(axis=0).max()))
        asymmetry = max(np.abs(w - w.T).max() for w in (topology.round(t).matrix() for t in range(num_rounds)))
        assert bool(asymmetry <= TOLERANCE) is contract.symmetric(n, **options), n
        assert topology.symmetric is contract.symmetric(n, **options), n
        assert max(degrees) <= contract.degree(n, **options), n


@quiet
@pytest.mark.parametrize(("contract", "options"), CASES)
def test_exactness(contract: Contract, options: dict[str, Any]) -> None:
    for n in served_sizes(contract, options):
        topology = topologies.build(contract.name, n, **options)
        expected = contract.exact(n, **options)
        if expected == NEVER:
            assert topology.exact_after is None, n
            far = [np.abs(dense_product(topology, k) - 1 / n).max() for k in range(1, 2 * topology.period + 1)]
            assert min(far) > 1e-9, n
        elif expected is not UNPROMISED:
            assert topology.exact_after == expected, n
        if topology.exact_after is not None:
            product = dense_product(topology, topology.exact_after)
            np.testing.assert_allclose(product, 1 / n, rtol=0, atol=TOLERANCE)
            for fewer in range(1, topology.exact_after):
                assert np.abs(dense_product(topology, fewer) - 1 / n).max() > TOLERANCE, n


@pytest.mark.parametrize(("contract", "options"), [case for case in CASES if case.values[0].name != "graph"])
def test_known_spectra(contract: Contract, options: dict[str, Any]) -> None:
    for n in served_sizes(contract, options):
        expected = contract.slem(n, **options)
        if expected is not None:
            topology = topologies.build(contract.name, n, **options)
            moduli = np.sort(np.abs(np.linalg.eigvals(topology.round(0).matrix())))
            assert moduli[-2] == pytest.approx(expected, abs=TOLERANCE), n
            assert topology.describe().slem == pytest.approx(expected, abs=TOLERANCE), n


@pytest.mark.parametrize("n", [n for n in SIZES if n >= 3 and n % 2])
def test_exponential_is_faster_for_odd_sizes(n: int) -> None:
    assert topologies.build("exponential", n).describe().slem < 1 - 2 / (1 + tau(n)) - 1e-9


@pytest.mark.parametrize(("contract", "options"), CASES)
def test_other_sizes_are_refused_with_what_is_possible(contract: Contract, options: dict[str, Any]) -> None:
    served = {1, *(n for n in range(2, 129) if contract.serves(n, **options))}
    for n in SIZES:
        if n in served:
            continue
        with pytest.raises(ValueError, match="world_size") as caught:
            topologies.build(contract.name, n, **options)
        message = str(caught.value)
        numbers = {int(number) for number in re.findall(r"\d+", message)}
        below = max(size for size in served if size < n)
        above = min((size for size in served if size > n), default=None)
        nearest = {size for size in (below, above) if size is not None}
        alone = served - {1}  # an option that fixes the size
        assert nearest <= numbers or (len(alone) == 1 and alone <= numbers), message


@quiet
@pytest.mark.parametrize(("contract", "options"), CASES)
def test_the_views_of_a_round_agree(contract: Contract, options: dict[str, Any]) -> None:
    for n in served_sizes(contract, options)[:12]:
        topology = topologies.build(contract.name, n, **options)
        for t in range(min(topology.period or 3, 4)):
            round_ = topology.round(t)
            matrix = round_.matrix()
            np.testing.assert_array_equal(nx.to_numpy_array(round_.graph, nodelist=range(n)).T, matrix)
            for i in range(n):
                reads = [j for j in range(n) if j != i and matrix[i, j]]
                read_by = [j for j in range(n) if j != i and matrix[j, i]]
                assert list(round_.neighbours(i).items()) == [(j, matrix[i, j]) for j in reads]
                assert round_.targets(i) == tuple(read_by)
                assert round_.peers(i) == tuple(sorted({*reads, *read_by}))
                assert round_.self_weight(i) == matrix[i, i]
            components = sorted(tuple(sorted(c)) for c in nx.weakly_connected_components(round_.graph))
            assert round_.groups == tuple(components)
            uniform = all(np.allclose(matrix[np.ix_(g, g)], 1 / len(g), rtol=0, atol=1e-14) for g in components)
            assert round_.uniform_groups == (round_.groups if uniform else None)


@quiet
@pytest.mark.parametrize(("contract", "options"), CASES)
def test_json_and_equality(contract: Contract, options: dict[str, Any]) -> None:
    for n in served_sizes(contract, options)[:6]:
        topology = topologies.build(contract.name, n, **options)
        again = Topology.from_json(topology.to_json())
        assert again == topology
        assert hash(again) == hash(topology)
        assert again.to_json() == topology.to_json()
        for t in (0, 1, 5):
            assert again.round(t) == topology.round(t)
            np.testing.assert_array_equal(again.round(t).matrix(), topology.round(t).matrix())

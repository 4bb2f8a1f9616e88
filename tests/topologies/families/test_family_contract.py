"""One contract for every family: what it states about itself in contracts.py, for every size from 1 to 40."""

import inspect
import math
import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
from contracts import CONTRACTS, NEVER, SIZES, TOLERANCE, UNPROMISED, Contract, assert_views_agree

import topologies
from topologies import Topology

CASES = [
    pytest.param(contract, options, id=f"{contract.name}-{number}")
    for contract in CONTRACTS
    for number, options in enumerate(contract.options)
]

quiet = pytest.mark.filterwarnings("ignore:weights='metropolis_hastings' never converges")


#: What no family takes for an option of this name: values, the error and its message.
NO_SHARES = [
    ((-0.1, 1.1, math.nan, math.inf), ValueError, r"must be .* 1, got "),
    (("half", True, 1j), TypeError, "must be a number, .* 1, got "),
]
REFUSED: dict[str, list[tuple[tuple[Any, ...], type[Exception], str]]] = {
    "seed": [((-1,), ValueError, "must be at least 0, got -1"), (("a", 1.5), TypeError, "must be an integer")],
    "k": [((0,), ValueError, "must be at least 1, got 0"), ((1.5,), TypeError, "must be an integer of at least 1")],
    "m": [((0,), ValueError, "must be at least 1, got 0"), ((1.5,), TypeError, "must be an integer of at least 1")],
    "p": [((1,), ValueError, "must be at least 2, got 1"), ((2.0,), TypeError, "must be an integer of at least 2")],
    "local_size": [((0,), ValueError, "must be at least 1, got 0")],
    "directed": [((1, "no"), TypeError, "must be True or False, got ")],
    "weights": [(("metro",), ValueError, "unknown weights 'metro'; available: metropolis, metropolis_hastings")],
    "probability": NO_SHARES,
    "eta": [*NO_SHARES, ((0,), ValueError, "must be above 0 and at most 1, got 0")],
    "budget": [*NO_SHARES, ((0,), ValueError, "must be above 0 and at most 1, got 0")],
}


def served_sizes(contract: Contract, options: dict[str, Any]) -> list[int]:
    return [n for n in (*SIZES, *contract.more_sizes) if n > 1 and contract.serves(n, **options)]


def distances_from_mean(topology: Topology, num_rounds: int) -> list[float]:
    """How far the dense product of the first 1, 2, ... rounds is from J."""
    n = topology.world_size
    mixed, found = np.eye(n), []
    for t in range(num_rounds):
        mixed = topology.round(t).matrix() @ mixed
        found.append(float(np.abs(mixed - 1 / n).max()))
    return found


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
        assert Topology.from_json(topology.to_json()) == topology
        assert topology.world_size == n
        assert topology.period == contract.period(n, **options), n
        assert topology.stochasticity == contract.stochasticity(n, **options), n
        num_rounds = topology.period or 6
        degrees, asymmetry = [], 0.0
        for t in range(num_rounds):
            round_ = topology.round(t)
            matrix = round_.matrix()
            assert matrix.shape == (n, n)
            assert matrix.dtype == np.float64
            if (negative := contract.negative_weights(n, **options)) is not None:
                assert bool((matrix < 0).any()) is negative, (n, t)
            for axis, kind in ((1, "row"), (0, "column")):
                if contract.stochasticity(n, **options) in ("doubly", kind):
                    assert np.abs(matrix.sum(axis=axis) - 1).max() <= 1e-15 * n, (n, t)
                else:
                    assert np.abs(matrix.sum(axis=axis) - 1).max() > TOLERANCE
            if contract.uniform_groups:
                assert round_.uniform_groups == round_.groups, (n, t)
            edges = matrix != 0
            np.fill_diagonal(edges, False)
            degrees.append(max(edges.sum(axis=1).max(), edges.sum(axis=0).max()))
            asymmetry = max(asymmetry, np.abs(matrix - matrix.T).max())
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
            assert min(distances_from_mean(topology, 2 * topology.period)) > 1e-9, n
        elif expected is not UNPROMISED:
            assert topology.exact_after == expected, n
        if topology.exact_after is not None:
            *before, last = distances_from_mean(topology, topology.exact_after)
            assert last <= TOLERANCE, n
            assert all(distance > TOLERANCE for distance in before), n


@pytest.mark.parametrize(("contract", "options"), [case for case in CASES if case.values[0].name != "graph"])
def test_known_spectra(contract: Contract, options: dict[str, Any]) -> None:
    for n in served_sizes(contract, options):
        expected = contract.slem(n, **options)
        if expected is not None:
            topology = topologies.build(contract.name, n, **options)
            moduli = np.sort(np.abs(np.linalg.eigvals(topology.round(0).matrix())))
            assert moduli[-2] == pytest.approx(expected, abs=TOLERANCE), n
            assert topology.describe().slem == pytest.approx(expected, abs=TOLERANCE), n


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


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_options_that_no_family_takes_are_refused(contract: Contract) -> None:
    options = contract.options[0]
    n = served_sizes(contract, options)[0]
    for option in inspect.signature(topologies.family(contract.name)).parameters:
        for values, error, message in REFUSED.get(option, ()):
            for value in values:
                with pytest.raises(error, match=message) as caught:
                    topologies.build(contract.name, n, **options | {option: value})
                assert option in str(caught.value)


@quiet
@pytest.mark.parametrize(("contract", "options"), CASES)
def test_the_views_of_a_round_agree(contract: Contract, options: dict[str, Any]) -> None:
    for n in served_sizes(contract, options)[:12]:
        topology = topologies.build(contract.name, n, **options)
        for t in range(min(topology.period or 3, 4)):
            round_ = topology.round(t)
            matrix = round_.matrix()
            assert np.array_equal(nx.to_numpy_array(round_.graph, nodelist=range(n)).T, matrix), (n, t)
            assert_views_agree(round_)
            components = sorted(tuple(sorted(c)) for c in nx.weakly_connected_components(round_.graph))
            assert round_.groups == tuple(components)
            uniform = all(np.allclose(matrix[np.ix_(g, g)], 1 / len(g), rtol=0, atol=1e-14) for g in components)
            assert round_.uniform_groups == (round_.groups if uniform else None)


@pytest.mark.parametrize(
    ("name", "n", "options"),
    [
        ("ring", 10**9, {}),
        ("exponential", 2**31, {}),
        ("one_peer_exponential", 2**31, {}),
        ("one_peer_hypercube", 2**20, {}),
        ("one_peer_ring", 1_000_000, {}),
        ("hyper_cuboid", 10**6, {"factors": (10, 100, 1000)}),
        ("hyper_hypercube", 735134400, {"k": 30}),
        ("simple_base", 10**9 + 7, {"k": 3}),
        ("base", 2_000_006, {"k": 1}),
        ("base", 1_000_000, {"k": 6}),
        ("de_bruijn", 2**31, {"p": 2}),
        ("equi_dyn", 1_000_003, {}),
        ("equi_dyn", 10**9, {"directed": True}),
        ("equi_static", 10**9, {}),
    ],
)
def test_a_rank_among_a_million_needs_no_whole_round(name: str, n: int, options: dict[str, Any]) -> None:
    topology = topologies.build(name, n, **options)
    for t in range(topology.period or 5):
        round_ = topology.round(t)
        for rank in (0, 1, 654_321, 777_777, n - 1):
            row = round_.neighbours(rank)
            assert round_.self_weight(rank) + sum(row.values()) == pytest.approx(1, abs=1e-14)
            assert list(row) == sorted(row)
            assert all(rank in round_.targets(other) for other in row)
            if topology.promised_symmetric:
                assert all(round_.neighbours(other)[rank] == weight for other, weight in row.items())
        assert "explicit" not in vars(round_._storage)

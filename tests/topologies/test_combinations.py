"""Topology.product, interleave and permuted against their definitions in numpy."""

import copy
import math
import pickle

import numpy as np
import pytest
from contracts import assert_views_agree
from hypothesis import given
from hypothesis import strategies as st

import topologies
from topologies import Round, Topology
from topologies.compositions import in_bursts

NAMES = ["complete", "ring", "directed_ring", "star", "exponential", "one_peer_exponential", "random_matching"]
PAIRS = list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))


@pytest.mark.parametrize(("machines", "local"), PAIRS)
def test_product_is_kronecker(machines: str, local: str) -> None:
    for num_machines, local_size in ((3, 2), (2, 4), (1, 3), (3, 1)):
        outer, inner = topologies.build(machines, num_machines), topologies.build(local, local_size)
        topology = outer.product(inner)
        assert topology.world_size == num_machines * local_size
        for t in range(6):
            expected = np.kron(outer.round(t).matrix(), inner.round(t).matrix())
            np.testing.assert_allclose(topology.round(t).matrix(), expected, rtol=0, atol=1e-16)
            assert_views_agree(topology.round(t))
        if None not in (outer.round(0).uniform_groups, inner.round(0).uniform_groups):
            assert "groups" in topology.round(0).to_dict(), "not its pairs, which are many"
        assert topology.stochasticity == "doubly"
        assert topology.symmetric == (outer.symmetric and inner.symmetric)
        periods = (outer.period, inner.period)
        assert topology.period == (None if None in periods else math.lcm(*periods))
        if None not in (outer.exact_after, inner.exact_after):
            assert topology.exact_after == max(outer.exact_after, inner.exact_after)
        elif topology.period is not None:
            assert topology.exact_after is None


def test_a_rank_that_keeps_nothing_in_a_product() -> None:
    swap = Topology.from_rounds([Round.from_matrix([[0, 1], [1, 0]])])
    assert_views_agree(swap.product(topologies.build("ring", 3)).round(0))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_interleave_takes_turns(one: str, other: str) -> None:
    even, odd = topologies.build(one, 4), topologies.build(other, 4)
    topology = even.interleave(odd)
    for t in range(12):
        assert topology.round(t) == (even, odd)[t % 2].round(t // 2)
    periods = (even.period, odd.period)
    assert topology.period == (None if None in periods else 2 * math.lcm(*periods))
    assert topology.symmetric == (even.symmetric and odd.symmetric)
    if "complete" in (one, other) and topology.period:
        assert topology.exact_after == (1 if one == "complete" else 2)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("case", range(len(NAMES) + 3))
def test_averages_in_every_kth_round(case: int, k: int) -> None:
    ring, star, matching = (topologies.build(name, 6) for name in ("ring", "star", "random_matching"))
    phased = (ring.every(2), star.then(ring, after=4), ring.then(matching.every(3).then(star, after=4), after=5))
    base = topologies.build(NAMES[case], 6) if case < len(NAMES) else phased[case - len(NAMES)]
    topology = base.averaged_every(k)
    for t in range(25):
        if (t + 1) % k:
            assert topology.round(t) == base.round(t)
        else:
            np.testing.assert_array_equal(topology.round(t).matrix(), np.full((6, 6), 1 / 6))
    assert topology.warmup == base.warmup
    assert Topology.from_json(topology.to_json()) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology
    if base.period is not None:
        assert topology.exact_after <= k


@pytest.mark.parametrize(("rounds", "apart"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_bursts_take_the_rounds_in_order(after: int, rounds: int, apart: int) -> None:
    """Also over the phases of a schedule, whose rounds end in the middle of a burst."""
    base = topologies.build("complete", 8).then(topologies.build("one_peer_exponential", 8).every(2), after=after)
    topology = in_bursts(base, 7, rounds, apart)
    places = sorted(7 * burst - 1 + apart * number for burst in range(9) for number in range(rounds))[rounds - 1 :]
    number = 0
    for t in range(6, 7 * 8 - 1):
        if t in places:
            number = number or rounds - 1
            assert topology.round(t) == base.round(number)
            number += 1
        else:
            assert topology.round(t).is_identity
    assert topology.period == 7 * math.lcm(6, rounds) // rounds
    assert pickle.loads(pickle.dumps(topology)) == topology


def test_averages_of_what_keeps_sums_only_or_averages_at_other_times() -> None:
    splits = Round.from_rows([{0: 0.5} if i else {} for i in range(4)]).matrix().T
    topology = Topology.from_rounds([Round.from_matrix(splits)], stochasticity="column").averaged_every(2)
    assert (topology.stochasticity, topology.promised_exact_after) == ("column", None)
    ring = topologies.build("ring", 4)
    twos = ring.averaged_every(2)
    assert twos.averaged_every(3).round(2).uniform_groups is not None
    assert ring.then(twos, after=1).averaged_every(2).round(3).uniform_groups is not None


@given(st.permutations(range(6)), st.sampled_from(NAMES))
def test_permuted_moves_the_ranks(order: list[int], name: str) -> None:
    base = topologies.build(name, 6)
    topology = base.permuted(order)
    for t in range(3):
        moved = topology.round(t).matrix()
        np.testing.assert_array_equal(moved[np.ix_(order, order)], base.round(t).matrix())
    assert_views_agree(topology.round(0))
    assert ("groups" in topology.round(0).to_dict()) == (base.round(0).uniform_groups is not None)
    properties = [(each.period, each.exact_after, each.symmetric) for each in (topology, base)]
    assert properties[0] == properties[1]


def test_phases_are_permuted_one_by_one() -> None:
    schedule = topologies.build("star", 4).then(topologies.build("ring", 4).every(2), after=3)
    topology = schedule.permuted([3, 1, 0, 2])
    assert (topology.warmup, topology.period) == (3, 2)
    for t in range(8):
        expected = schedule.round(t).matrix()
        np.testing.assert_array_equal(topology.round(t).matrix()[np.ix_([3, 1, 0, 2], [3, 1, 0, 2])], expected)


def combinations() -> list[Topology]:
    ring, star, exponential = (topologies.build(name, 4) for name in ("ring", "star", "one_peer_exponential"))
    complete = topologies.build("complete", 2)
    return [
        ring.product(complete),
        ring.product(complete).every(3),
        ring.every(2).product(complete),
        ring.interleave(star),
        ring.interleave(exponential.interleave(star)),
        ring.permuted([0, 2, 1, 3]),
        star.then(ring.permuted([0, 2, 1, 3]).interleave(star), after=3),
        ring.every(2),
        Topology.from_rounds([Round.identity(4), ring.round(0)], name=ring.every(2).name),
        star.then(ring, after=2),
        ring.then(star.every(2), after=2),
        topologies.build("random_matching", 4, seed=1).every(2),
        topologies.build("hyper_cuboid", 4, factors=[2, 2]),
        topologies.build("random_matching", 4, seed=1).product(complete),
    ]


def test_json_pickle_copies_and_equality() -> None:
    others = combinations()
    for number, topology in enumerate(combinations()):
        for again in (
            Topology.from_json(topology.to_json()),
            pickle.loads(pickle.dumps(topology)),
            copy.deepcopy(topology),
            others[number],
        ):
            assert again == topology
            assert hash(again) == hash(topology)
            assert repr(again) == repr(topology)
            for t in range(5):
                assert again.round(t) == topology.round(t)
        for other_number, other in enumerate(others):
            assert (topology == other) is (number == other_number), (topology, other)

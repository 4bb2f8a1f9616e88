"""simple_base and base: the matrices of the definition, written out by hand or checked against it, for every n."""

import math
from fractions import Fraction

import numpy as np
import pytest

import topologies
from topologies import Round, Topology

KS = (1, 2, 3, 4, 5)
LARGE = 1_000_003  # a prime

Exchange = dict[int, dict[int, Fraction]]


def length(topology: Topology) -> int:
    assert topology.period is not None
    return topology.period


def digits(n: int, base: int) -> list[int]:
    """The digits of n, the lowest first."""
    return [n % base, *digits(n // base, base)] if n else []


def is_smooth(n: int, largest: int) -> bool:
    for factor in range(2, largest + 1):
        while n % factor == 0:
            n //= factor
    return n == 1


def blocks(n: int, k: int) -> list[list[range]]:
    """The sub-blocks of every block, the largest first."""
    found, start = [], 0
    for power, digit in reversed(list(enumerate(digits(n, k + 1)))):
        size = (k + 1) ** power
        if digit:
            found.append([range(start + i * size, start + (i + 1) * size) for i in range(digit)])
            start += digit * size
    return found


def unequal(round_: Round) -> Exchange:
    """The weights of a round on edges outside of groups that average, as the fractions that they stand for."""
    edges: Exchange = {}
    for rank in range(round_.world_size):
        row = round_.neighbours(rank)
        group = {rank, *row}
        if any({other, *round_.neighbours(other)} != group for other in row) or any(
            weight != 1 / len(group) for weight in row.values()
        ):
            edges[rank] = {j: Fraction(weight).limit_denominator(1000) for j, weight in row.items()}
    return edges


def rows(topology: Topology, t: int) -> list[dict[int, float]]:
    return [topology.round(t).neighbours(rank) for rank in range(topology.world_size)]


def pairs(n: int, *groups: tuple[int, int]) -> list[dict[int, float]]:
    expected: list[dict[int, float]] = [{} for _ in range(n)]
    for one, other in groups:
        expected[one], expected[other] = {other: 0.5}, {one: 0.5}
    return expected


@pytest.mark.parametrize("k", KS)
def test_partners_are_distinct_and_one_in_every_sub_block(k: int) -> None:
    for n in (size for size in range(2, 131) if not is_smooth(size, k + 1)):
        parts = blocks(n, k)
        topology = topologies.build("simple_base", n, k=k)
        num_inner = len(digits(n, k + 1)) - 1 + (len(parts[0]) > 1)
        for j, sub_blocks in enumerate(parts[:-1]):
            round_ = topology.round(num_inner + j)
            later = range(sub_blocks[-1].stop, n)
            share = Fraction(len(sub_blocks) * len(sub_blocks[0]), n - sub_blocks[0].start)
            taken: list[int] = []
            for rank in later:
                row = round_.neighbours(rank)
                assert [sum(other in part for other in row) for part in sub_blocks] == [1] * len(sub_blocks)
                assert len(row) == len(sub_blocks)
                assert all(abs(w - float(share / len(sub_blocks))) <= 1e-15 for w in row.values())
                assert abs(round_.self_weight(rank) - float(1 - share)) <= 1e-15
                taken += row
            assert len(set(taken)) == len(taken)
            for rank in taken:
                assert len(round_.neighbours(rank)) == 1
                assert abs(round_.self_weight(rank) - float(1 - share / len(sub_blocks))) <= 1e-15
            free = {rank for part in sub_blocks for rank in part} - set(taken)
            for rank in free:
                group = {rank, *round_.neighbours(rank)}
                assert group <= free
                assert len(group) <= k + 1
                assert set(round_.neighbours(rank).values()) <= {1 / len(group)}
        # Outside of the exchanges the rounds are groups that average.
        for t in (*range(num_inner), *range(num_inner + len(parts) - 1, length(topology))):
            assert topology.round(t).uniform_groups is not None


def test_five_ranks_in_pairs_of_unequal_weight() -> None:
    topology = topologies.build("simple_base", 5, k=1)
    assert topology.period == 5
    cube = [pairs(5, (0, 1), (2, 3)), pairs(5, (0, 2), (1, 3))]
    assert [rows(topology, t) for t in (0, 1, 3, 4)] == cube * 2
    exchange = topology.round(2)
    assert [exchange.neighbours(i) for i in range(5)] == [{4: 0.8}, {2: 0.5}, {1: 0.5}, {}, {0: 0.8}]
    assert exchange.self_weight(4) == pytest.approx(1 / 5, abs=1e-15)
    assert exchange.self_weight(0) == pytest.approx(1 / 5, abs=1e-15)
    assert exchange.self_weight(3) == 1


def test_six_ranks_are_two_copies_of_three() -> None:
    topology = topologies.build("base", 6)
    assert topology.period == 4
    assert [rows(topology, t) for t in (0, 2)] == [pairs(6, (0, 1), (3, 4))] * 2
    third = Fraction(2, 3)
    assert unequal(topology.round(1)) == {0: {2: third}, 2: {0: third}, 3: {5: third}, 5: {3: third}}
    assert rows(topology, 3) == pairs(6, (0, 3), (1, 4), (2, 5))
    assert topologies.build("simple_base", 6).period == 5


def test_seven_ranks_with_one_and_two_peers() -> None:
    one = topologies.build("base", 7, k=1)
    assert one.period == 5
    assert [rows(one, t) for t in (0, 1)] == [
        pairs(7, (0, 1), (2, 3), (4, 5)),
        pairs(7, (0, 2), (1, 3), (4, 5)),
    ]
    first, second = Fraction(4, 7), Fraction(2, 3)
    partners = {(0, 4), (1, 5), (2, 6)}
    assert unequal(one.round(2)) == {a: {b: first} for pair in partners for a, b in (pair, pair[::-1])}
    assert unequal(one.round(3)) == {4: {6: second}, 6: {4: second}}
    assert one.round(3).neighbours(0) == {1: 0.5}
    assert rows(one, 4) == pairs(7, (0, 2), (1, 3), (4, 5))

    two = topologies.build("base", 7, k=2)  # 7 = 2 * 3 + 1: a star with a partner in both halves of six
    assert [two.round(t).groups for t in (0, 1, 3)] == [
        ((0, 1, 2), (3, 4, 5), (6,)),
        ((0, 3), (1, 4), (2, 5), (6,)),
        ((0, 1, 2), (3, 4, 5), (6,)),
    ]
    share = Fraction(3, 7)
    assert unequal(two.round(2)) == {0: {6: share}, 3: {6: share}, 6: {0: share, 3: share}}
    assert two.round(2).groups == ((0, 3, 6), (1, 2, 4), (5,))


def test_nine_and_eleven_ranks() -> None:
    nine = topologies.build("base", 9, k=1)
    assert nine.period == 7
    assert unequal(nine.round(3)) == {0: {8: Fraction(8, 9)}, 8: {0: Fraction(8, 9)}}
    assert nine.round(3).groups == ((0, 8), (1, 2), (3, 4), (5, 6), (7,))
    assert topologies.build("base", 9, k=2).period == 2

    eleven = topologies.build("base", 11, k=1)
    assert eleven.period == 7
    assert [eleven.round(t).groups for t in (3, 4, 5, 6)] == [
        ((0, 8), (1, 9), (2, 10), (3, 4), (5, 6), (7,)),
        ((0, 1), (2, 3), (4, 5), (6, 7), (8, 10), (9,)),
        ((0, 2), (1, 3), (4, 6), (5, 7), (8, 9), (10,)),
        ((0, 4), (1, 5), (2, 6), (3, 7), (8,), (9,), (10,)),
    ]
    assert {w for row in unequal(eleven.round(3)).values() for w in row.values()} == {Fraction(8, 11)}
    assert unequal(eleven.round(4)) == {8: {10: Fraction(2, 3)}, 10: {8: Fraction(2, 3)}}

    stars = topologies.build("base", 11, k=2)
    assert stars.period == 5
    assert stars.round(2).groups == ((0, 9), (1, 10), (2, 3, 4), (5, 6, 7), (8,))


def test_every_rank_takes_part_in_stars() -> None:
    """14 = 3 * 4 + 2 with k = 3: each of the two last ranks has a partner in all three sub-blocks."""
    exchange = topologies.build("simple_base", 14, k=3).round(2)
    share = 4 / 14
    assert exchange.neighbours(12) == {0: share, 4: share, 8: share}
    assert exchange.neighbours(13) == {1: share, 5: share, 9: share}
    assert exchange.self_weight(12) == pytest.approx(2 / 14, abs=1e-15)
    assert exchange.self_weight(0) == pytest.approx(10 / 14, abs=1e-15)


def test_shorter_blocks_repeat_before_the_exchanges_and_idle_after_them() -> None:
    thirteen = topologies.build("simple_base", 13)  # 8 + 4 + 1
    assert [thirteen.round(t).groups[4:] for t in range(3)] == [
        ((8, 9), (10, 11), (12,)),
        ((8, 10), (9, 11), (12,)),
        ((8, 9), (10, 11), (12,)),
    ]
    six = topologies.build("simple_base", 6)  # 4 + 2
    assert [six.round(t).groups for t in range(5)] == [
        ((0, 1), (2, 3), (4, 5)),
        ((0, 2), (1, 3), (4, 5)),
        ((0, 4), (1, 5), (2, 3)),
        ((0, 1), (2, 3), (4, 5)),
        ((0, 2), (1, 3), (4,), (5,)),
    ]
    fourteen = topologies.build("simple_base", 14, k=3)  # 3 * 4 + 2, the last block is two sub-blocks of one
    assert fourteen.round(1).neighbours(12) == {13: 0.5}
    assert fourteen.round(3).neighbours(12) == {}


@pytest.mark.parametrize("n", [LARGE, 1_000_000, 2 * LARGE])
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("name", ["base", "simple_base"])
def test_a_rank_among_a_million_needs_no_whole_round(name: str, n: int, k: int) -> None:
    topology = topologies.build(name, n, k=k)
    assert length(topology) <= 2 * (math.floor(math.log(n, k + 1)) + 1)
    ranks = {0, n - 1, *np.random.default_rng((n, k)).integers(n, size=25).tolist()}
    for t in range(length(topology)):
        round_ = topology.round(t)
        for rank in ranks:
            row = round_.neighbours(rank)
            assert len(row) <= k
            assert list(row) == sorted(row)
            assert round_.targets(rank) == tuple(row)
            assert round_.self_weight(rank) + sum(row.values()) == pytest.approx(1, abs=1e-14)
            assert round_.self_weight(rank) >= 0
            for other, weight in row.items():
                assert 0 <= other < n
                assert round_.neighbours(other)[rank] == weight > 0
        assert "explicit" not in vars(round_._storage)  # nothing asked for the whole round

"""What single families do beyond the contract: rounds written out by hand, options and their refusals."""

from collections import Counter

import numpy as np
import pytest

import topologies


def rounds(name: str, world_size: int, **options: object) -> list[tuple[tuple[int, ...], ...]]:
    topology = topologies.build(name, world_size, **options)
    assert topology.period is not None
    return [topology.round(t).groups for t in range(topology.period)]


def test_directed_ring_reads_the_next_rank() -> None:
    round_ = topologies.build("directed_ring", 5).round(0)
    assert [round_.neighbours(i) for i in range(5)] == [{1: 0.5}, {2: 0.5}, {3: 0.5}, {4: 0.5}, {0: 0.5}]
    assert [round_.targets(i) for i in range(5)] == [(4,), (0,), (1,), (2,), (3,)]
    state = round_.matrix() @ np.array([0, 0, 1, 0, 0])
    np.testing.assert_array_equal(state, [0, 0.5, 0.5, 0, 0])


def test_grid_and_torus_count_ranks_by_rows() -> None:
    assert topologies.build("grid", 6).options["shape"] == (2, 3)
    assert topologies.build("grid", 6).round(0).peers(0) == (1, 3)
    assert topologies.build("grid", 6, shape=(3, 2)).round(0).peers(2) == (0, 3, 4)
    assert topologies.build("torus", 12).options["shape"] == (3, 4)
    assert topologies.build("torus", 12).round(0).peers(0) == (1, 3, 4, 8)
    assert topologies.build("torus", 8, shape=(2, 4)).round(0).peers(0) == (1, 3, 4)
    assert topologies.build("grid", 7).round(0) == topologies.build("path", 7).round(0)


def test_exponential_hops() -> None:
    round_ = topologies.build("exponential", 6).round(0)
    assert round_.neighbours(4) == {0: 0.25, 2: 0.25, 5: 0.25}
    undirected = topologies.build("undirected_exponential", 6).round(0)
    assert undirected.peers(0) == (1, 2, 4, 5)
    assert topologies.build("undirected_exponential", 8).round(0).peers(0) == (1, 2, 4, 6, 7)


def test_one_peer_exponential_hops() -> None:
    topology = topologies.build("one_peer_exponential", 6)
    reads = [list(topology.round(t).neighbours(0)) for t in range(4)]
    assert reads == [[1], [2], [4], [1]]
    assert topology.round(2).targets(0) == (2,)


def test_hyper_cuboid_counts_the_first_digit_fastest() -> None:
    assert rounds("hyper_cuboid", 6, factors=(2, 3)) == [((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5))]
    three = rounds("hyper_cuboid", 12, factors=(2, 3, 2))
    assert three[1] == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert three[2] == tuple((rank, rank + 6) for rank in range(6))


def test_alternating_exp_ring_by_hand() -> None:
    # Nodes (0 1)(2 3)(4 5)(6 7). Hop 0 pairs nodes 0-1 (number 0) and 2-3 (1), hop 1 pairs 0-2 (2) and 1-3 (3).
    assert rounds("alternating_exp_ring", 8, local_size=2) == [
        ((0, 1), (2, 3), (4, 5, 6, 7)),
        ((0, 1, 2, 3), (4, 5), (6, 7)),
        ((0, 1), (2, 3, 6, 7), (4, 5)),
        ((0, 1, 4, 5), (2, 3), (6, 7)),
    ]


def test_alternating_exp_ring_numbers_the_pairs_through_all_hops() -> None:
    # Two nodes: one pair per hop; four: two pairs per hop, so every hop starts with an even number again.
    assert rounds("alternating_exp_ring", 6, local_size=3) == [((0, 1, 2), (3, 4, 5)), (tuple(range(6)),)]
    uses_network = [
        sum(len(group) == 4 for group in groups) for groups in rounds("alternating_exp_ring", 16, local_size=2)
    ]
    assert uses_network == [2] * 6


def test_random_matching_is_uniform_and_idles_one_rank() -> None:
    topology = topologies.build("random_matching", 4, seed=1)
    counts = Counter(topology.round(t).groups for t in range(3000))
    assert len(counts) == 3
    assert all(abs(count - 1000) < 130 for count in counts.values())  # 5 standard deviations
    idle = Counter(
        next(group[0] for group in topologies.build("random_matching", 3, seed=1).round(t).groups if len(group) == 1)
        for t in range(300)
    )
    assert set(idle) == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "world_size", "options", "error", "message"),
    [
        ("grid", 10, {"shape": (3, 4)}, ValueError, r"\(3, 4\).*12 ranks.*rows out of 1, 2, 5, 10"),
        ("torus", 10, {"shape": 5}, TypeError, r"pair \(rows, columns\), got 5"),
        ("torus", 10, {"shape": (2.0, 5)}, TypeError, r"side of shape must be an integer"),
        ("hypercube", 12, {}, ValueError, r"power of two, got 12; the nearest are 8 and 16"),
        ("one_peer_ring", 7, {}, ValueError, r"even, got 7; the nearest are 6 and 8"),
        ("hyper_cuboid", 10, {"factors": (3, 4)}, ValueError, r"multiply to 12, world_size is 10.*\(2, 5\)"),
        ("hyper_cuboid", 10, {"factors": ()}, TypeError, r"at least one integer"),
        ("hyper_cuboid", 10, {"factors": (-2, -5)}, ValueError, r"a factor in factors must be at least 1, got -2"),
        ("hyper_hypercube", 22, {"k": 3}, ValueError, r"at most k \+ 1 = 4, got 22; .*18 and 24.*k of at least 10"),
        ("local_global", 10, {"local_size": 4}, ValueError, r"the nearest are 8 and 12.*\[1, 2, 5, 10\]"),
        ("alternating_exp_ring", 24, {"local_size": 4}, ValueError, r"at least 8, got 24; the nearest are 16 and 32"),
    ],
)
def test_refusals_say_what_is_possible(
    name: str, world_size: int, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        topologies.build(name, world_size, **options)

"""What single families do beyond the contract: rounds written out by hand, options and their refusals."""

from collections import Counter

import pytest

import topologies


def rounds(name: str, world_size: int, **options: object) -> list[tuple[tuple[int, ...], ...]]:
    topology = topologies.build(name, world_size, **options)
    assert topology.period is not None
    return [topology.round(t).groups for t in range(topology.period)]


def test_grid_and_torus_count_ranks_by_rows() -> None:
    assert topologies.build("grid", 6).options["shape"] == (2, 3)
    assert topologies.build("grid", 6).round(0).peers(0) == (1, 3)
    assert topologies.build("grid", 6, shape=(3, 2)).round(0).peers(2) == (0, 3, 4)
    assert topologies.build("torus", 12).options["shape"] == (3, 4)
    assert topologies.build("torus", 12).round(0).peers(0) == (1, 3, 4, 8)
    assert topologies.build("torus", 8, shape=(2, 4)).round(0).peers(0) == (1, 3, 4)
    assert topologies.build("grid", 7).round(0) == topologies.build("path", 7).round(0)


def test_alternating_exp_ring_by_hand() -> None:
    # Nodes (0 1)(2 3)(4 5)(6 7). Hop 0 pairs nodes 0-1 (number 0) and 2-3 (1), hop 1 pairs 0-2 (2) and 1-3 (3).
    assert rounds("alternating_exp_ring", 8, local_size=2) == [
        ((0, 1), (2, 3), (4, 5, 6, 7)),
        ((0, 1, 2, 3), (4, 5), (6, 7)),
        ((0, 1), (2, 3, 6, 7), (4, 5)),
        ((0, 1, 4, 5), (2, 3), (6, 7)),
    ]


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
        ("hyper_cuboid", 10, {"factors": (3, 4)}, ValueError, r"multiply to 12, world_size is 10.*\(2, 5\)"),
        ("hyper_cuboid", 10, {"factors": (-2, -5)}, ValueError, r"a factor in factors must be at least 1, got -2"),
        ("hyper_hypercube", 22, {"k": 3}, ValueError, r"at most k \+ 1 = 4, got 22; .*18 and 24.*k of at least 10"),
        ("local_global", 10, {"local_size": 4}, ValueError, r"the nearest are 8 and 12.*\[1, 2, 5, 10\]"),
    ],
)
def test_refusals_say_what_is_possible(
    name: str, world_size: int, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        topologies.build(name, world_size, **options)

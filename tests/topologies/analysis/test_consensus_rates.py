"""consensus_rate against the products of the rounds themselves, for every family on up to eight ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import topologies
from topologies import Round, Topology, analysis

NUM_ROUNDS = 64


def topologies_of(n: int) -> list[Topology]:
    return [found for name in topologies.available() for found in topologies.variants(name, n)]


def left_after(topology: Topology) -> list[float]:
    """The norms of R_k - J for k = 0 .. 64."""
    n = topology.world_size
    mixed, left = np.eye(n), [1.0 if n > 1 else 0.0]
    for t in range(NUM_ROUNDS):
        mixed = topology.round(t).matrix() @ mixed
        left.append(float(np.linalg.norm(mixed - 1 / n, 2)))
    return left


def ends(left: list[float]) -> bool:
    """Whether one round takes what is far more than rounding to nothing."""
    return left[0] == 0.0 or any(before > 1e-9 and after < 1e-14 for before, after in itertools.pairwise(left))


@pytest.mark.parametrize("n", range(1, 9))
def test_the_rate_is_that_of_the_product(n: int) -> None:
    for topology in topologies_of(n):
        rate, left = analysis.consensus_rate(topology), left_after(topology)
        assert (rate == 0.0) == ends(left), topology
        if rate == 0.0:
            assert analysis.rate_per_byte(topology) == 0.0 or n == 1, topology
        elif topology.period is not None:
            period = np.eye(n)
            for t in range(topology.period):
                period = topology.round(t).matrix() @ period
            radius = float(np.abs(np.linalg.eigvals(period - 1 / n)).max())
            assert rate == pytest.approx(radius ** (1 / topology.period), abs=1e-9), topology
        else:
            sampled = [k for k in range(1, NUM_ROUNDS + 1) if left[k] > 1e-10]
            assert rate == pytest.approx(left[sampled[-1]] ** (1 / sampled[-1]), rel=0.2), topology
        assert rate < 1 - 1e-6, topology  # 1 says that they never agree, and these do


@pytest.mark.parametrize(("name", "options"), [("random_matching", {}), ("matcha", {"graph": "ring"})])
def test_four_ranks_that_agree_by_chance(name: str, options: dict[str, str]) -> None:
    """Their worst disagreement is untouched for a round or two, and then nothing is left of it."""
    topology = topologies.build(name, 4, **options)
    assert analysis.consensus_errors(topology, 4).tolist()[-1] == 0.0
    assert topology.describe().rate == 0.0
    assert "consensus rate  0 per round" in " ".join(str(topology.describe()).split("\n"))
    (row,) = topologies.compare([topology]).rows
    assert (row.rate, row.rate_per_byte) == (0.0, 0.0)


@pytest.mark.parametrize("n", [400, 1500])
def test_many_ranks_that_agree_by_one_late_round(n: int) -> None:
    whole, none = Round.from_groups(n, [range(n)]), Round.identity(n)
    assert analysis.consensus_rate(Topology.from_function(lambda t: whole if t == 40 else none)) == 0.0
    assert analysis.consensus_rate(Topology.from_function(lambda _: none)) == pytest.approx(1.0)

"""The shuffle that is computed card by card."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
from topologies.families.swap_or_not import SwapOrNotShuffle


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_every_card_has_one_place(size: int, seed: int) -> None:
    shuffle = SwapOrNotShuffle(size, np.random.default_rng(seed))
    places = [shuffle.place_of(card) for card in range(size)]
    assert sorted(places) == list(range(size))
    assert [shuffle.card_at(place) for place in places] == list(range(size))


def test_all_orders_are_equally_likely() -> None:
    num_draws = 12_000
    shuffles = (SwapOrNotShuffle(4, np.random.default_rng((3, draw))) for draw in range(num_draws))
    counts = Counter(tuple(map(shuffle.place_of, range(4))) for shuffle in shuffles)
    expected = num_draws / 24
    chi_squared = sum((counts[order] - expected) ** 2 / expected for order in itertools.permutations(range(4)))
    assert chi_squared < 49.7  # the 99.9 % quantile for 23 degrees of freedom


@pytest.mark.parametrize("world_size", [70_000, 70_001])
def test_large_matchings_are_pairs_without_the_whole_round(world_size: int) -> None:
    topology = topologies.build("random_matching", world_size, seed=5)
    partners = []
    for rank in (0, 1, 34_567, world_size - 1):
        for other, weight in topology.round(3).neighbours(rank).items():
            assert weight == 0.5
            assert topology.round(3).neighbours(other) == {rank: 0.5}
            assert topology.round(3).targets(rank) == (other,)
            partners.append(other)
    assert partners != [next(iter(topology.round(4).neighbours(rank))) for rank in (0, 1, 34_567, world_size - 1)]
    again = topologies.build("random_matching", world_size, seed=5)
    assert again.round(3).neighbours(34_567) == topology.round(3).neighbours(34_567)


def test_one_rank_of_a_large_odd_matching_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topologies.families.random_matching._MOST_DRAWN_AS_A_WHOLE", 4)
    round_ = topologies.build("random_matching", 101).round(2)
    assert sorted(map(len, round_.groups)) == [1, *[2] * 50]
    assert round_.uniform_groups == round_.groups

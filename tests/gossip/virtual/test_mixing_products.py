"""The sums that mix stacked messages, against the dense product."""

from __future__ import annotations

import pytest
import torch

import topologies
from gossip.virtual.mixing_products import known_rows, weighted_differences
from gossip.virtual.shards import Shard
from topologies import Round

ROUNDS = {
    "large groups": Round.from_groups(20, [range(9), range(9, 12)]),  # of different sizes, and ranks that are alone
    "small groups": Round.from_groups(20, [range(3), range(5, 10)]),
    "weights": topologies.build("star", 20).round(0),
    "one way": topologies.build("directed_ring", 20).round(0),
}
PARTS = {"one shard": [range(20)], "three shards": [range(7), range(7, 8), range(8, 20)]}


@pytest.mark.parametrize("round_", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_differences_are_those_of_the_matrix(round_: Round, parts: list[range]) -> None:
    values = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shards = [Shard(ranks, torch.device("cpu"), {}, {}) for ranks in parts]
    messages = [values[ranks.start : ranks.stop] for ranks in parts]
    found = weighted_differences(round_, shards, messages, torch.float64, known_rows(shards))
    wanted = torch.from_numpy(round_.matrix()) @ values - values
    torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-14)

"""The combination rule by itself, with and without a dimension of workers."""

from __future__ import annotations

import pytest
import torch

import topologies
from gossip import AdaptThenCombine, AdaptWhileCommunicating, Algorithm

ALGORITHMS = [AdaptWhileCommunicating(), AdaptThenCombine(), AdaptWhileCommunicating(gamma=0.25)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("workers", [(), (5,), (2, 3)])
def test_combination_adds_what_mixing_changed_in_the_message(algorithm: Algorithm, workers: tuple[int, ...]) -> None:
    values, message, mixed = (torch.randn(*workers, 7, dtype=torch.float64) for _ in range(3))
    wanted = values + algorithm.gamma * (mixed - message)
    algorithm.combine_(values, mixed - message, 0)
    torch.testing.assert_close(values, wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["ring", "directed_ring", "star", "one_peer_exponential"])
def test_mean_is_kept_whatever_the_messages_lost(algorithm: Algorithm, name: str) -> None:
    matrix = torch.from_numpy(topologies.build(name, 6).round(0).matrix())
    values = torch.randn(6, 100, dtype=torch.float64)
    mean = values.mean(0)
    messages = values.round(decimals=1)
    algorithm.combine_(values, matrix @ messages - messages, 0)
    torch.testing.assert_close(values.mean(0), mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision_is_rounded_once(algorithm: Algorithm) -> None:
    values = torch.full((3,), 1.0, dtype=torch.bfloat16)
    # 3/4 of the last place: lost, if it were rounded before it is added
    algorithm.combine_(values, torch.full((3,), 0.75 * 2**-7 / algorithm.gamma), 0)
    assert torch.equal(values, torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan"), "half"])
def test_mixing_factor_out_of_range_is_refused(gamma: object) -> None:
    with pytest.raises(ValueError, match=r"gamma must be between 0 and 1"):
        AdaptWhileCommunicating(gamma)
    with pytest.raises(ValueError, match=r"gamma must be between 0 and 1"):
        AdaptThenCombine(lambda _: gamma).combine_(torch.zeros(1), torch.zeros(1), 0)


def test_mixing_factor_may_follow_the_round() -> None:
    values = torch.zeros(3)
    algorithm = AdaptWhileCommunicating(lambda t: 1 / (1 + t))
    algorithm.combine_(values, torch.ones(3), 3)
    assert torch.equal(values, torch.full((3,), 0.25))

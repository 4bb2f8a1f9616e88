"""The combination rule by itself, with and without a dimension of workers."""

from __future__ import annotations

import pytest
import torch

import topologies
from gossip import AdaptWhileCommunicating

ALGORITHMS = [AdaptWhileCommunicating()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("workers", [(), (5,), (2, 3)])
def test_combination_adds_what_mixing_changed_in_the_message(
    algorithm: AdaptWhileCommunicating, workers: tuple[int, ...]
) -> None:
    values, message, mixed = (torch.randn(*workers, 7, dtype=torch.float64) for _ in range(3))
    wanted = values + mixed - message
    algorithm.combine_(values, message.clone(), mixed.clone())
    torch.testing.assert_close(values, wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["ring", "directed_ring", "star", "one_peer_exponential"])
def test_mean_is_kept_whatever_the_messages_lost(algorithm: AdaptWhileCommunicating, name: str) -> None:
    matrix = torch.from_numpy(topologies.build(name, 6).round(0).matrix())
    values = torch.randn(6, 100, dtype=torch.float64)
    mean = values.mean(0)
    messages = values.round(decimals=1)
    algorithm.combine_(values, messages, matrix @ messages)
    torch.testing.assert_close(values.mean(0), mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision_is_rounded_once(algorithm: AdaptWhileCommunicating) -> None:
    values = torch.full((3,), 1.0, dtype=torch.bfloat16)
    mixed = torch.full((3,), 1.0 + 2**-7)  # representable only because the sum is rounded to bfloat16 at its end
    algorithm.combine_(values, torch.full((3,), 1.0, dtype=torch.bfloat16), mixed)
    assert torch.equal(values, torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16))

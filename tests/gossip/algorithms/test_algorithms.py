"""The mixing factor, and rounding; the recursions are in the contract."""

from __future__ import annotations

import pytest
import torch

from gossip import AdaptThenCombine, AdaptWhileCommunicating, Algorithm


@pytest.mark.parametrize("algorithm", [AdaptThenCombine(), AdaptWhileCommunicating(gamma=0.25)])
def test_half_precision_is_rounded_once(algorithm: Algorithm) -> None:
    values = torch.full((3,), 1.0, dtype=torch.bfloat16)
    # 3/4 of the last place: lost, if it were rounded before it is added
    algorithm.combine_(values, torch.full((3,), 0.75 * 2**-7 / algorithm.gamma), 0)
    assert torch.equal(values, torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize("gamma", [-0.1, float("nan")])
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

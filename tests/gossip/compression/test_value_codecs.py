"""Messages that are the values themselves: what half precision does not hold."""

from __future__ import annotations

import torch
from exchanging import Ranks

import topologies
from gossip import Cast


def test_values_beyond_float16_are_sent_as_its_largest_and_infinity_as_itself() -> None:
    values = [torch.zeros(3), torch.tensor([1e5, -1e5, 1.0])]
    ranks = Ranks(Cast("float16"), topologies.build("complete", 2), values)
    received, own = ranks.exchange(0)
    assert received is not None
    assert own is not None
    assert received.tolist() == [65504 / 2, -65504 / 2, 0.5]
    assert own.tolist() == [-65504 / 2, 65504 / 2, -0.5]
    assert ranks.are_finite == {0: True, 1: True}
    assert Cast("float16").messages(torch.tensor([1e5, torch.inf])).tolist() == [65504, torch.inf]

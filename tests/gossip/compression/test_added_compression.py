"""The compression of docs/extending/compression.md works as it stands there."""

from __future__ import annotations

import torch
from examples import defined
from exchanging import Ranks

import topologies


def test_added_compression_keeps_the_mean_and_brings_replicas_together() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(300, generator=generator) for _ in range(4)]
    compression = defined("docs/extending/compression.md", 0)["Linear"]()
    ranks = Ranks(compression, topologies.build("ring", 4), values)
    mean, before = ranks.mean, ranks.distance
    for step in range(30):
        ranks.mix(step)
    assert ranks.num_bytes == 2 * 4 * 304
    assert ranks.distance < before / 20
    torch.testing.assert_close(ranks.mean, mean, rtol=0, atol=1e-6)
    ranks.values[0][2] = torch.inf
    ranks.exchange(30)
    assert not ranks.are_finite[1]

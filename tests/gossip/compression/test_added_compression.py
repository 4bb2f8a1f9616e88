"""The compression of docs/extending/compression.md works as it stands there."""

from __future__ import annotations

import pytest
import torch
from examples import defined
from exchanging import Ranks
from ranks import run_ranks
from replicas import SGD, TINY_BUCKETS, rank_module, snapshot, train

import topologies
from gossip import COMPRESSIONS, Compression, GossipDataParallel


def linear() -> Compression:
    compression: Compression = defined("docs/extending/compression.md", 0)["Linear"]()
    return compression


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_added_compression_keeps_the_mean_and_brings_replicas_together(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(300, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    ranks = Ranks(linear(), topologies.build("ring", 4), values)
    mean, before = ranks.mean, ranks.distance
    for step in range(30):
        ranks.mix(step)
    assert ranks.num_bytes == 2 * 4 * 304
    assert ranks.distance < before / 20
    torch.testing.assert_close(ranks.mean, mean, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_added_compression_tells_what_is_not_finite() -> None:
    ranks = Ranks(linear(), topologies.build("complete", 2), [torch.ones(5), torch.ones(5)])
    ranks.values[0][2] = torch.inf
    ranks.exchange(0)
    assert not ranks.are_finite[1]


def train_with_it(name: str) -> list[torch.Tensor]:
    if name == "linear":
        COMPRESSIONS.register("linear")(defined("docs/extending/compression.md", 0)["Linear"])
    compression = "linear" if name == "linear" else None
    model = GossipDataParallel(rank_module(), SGD, "ring", bucket_cap_mb=TINY_BUCKETS, compression=compression)
    train(model, range(4))
    model.global_avg()
    model.close()
    return list(snapshot(model).values())


def test_added_compression_trains() -> None:
    compressed, plain = (run_ranks(train_with_it, name, world_size=3)[0] for name in ("linear", "none"))
    for one, other in zip(compressed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert not all(torch.equal(one, other) for one, other in zip(compressed, plain, strict=True))

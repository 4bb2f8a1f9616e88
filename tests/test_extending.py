"""The topology, the compression and the transport of docs/extending work as they stand there."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import defined
from exchanging import Ranks
from replicas import SGD, TINY_BUCKETS, rank_module, snapshot, train

import topologies
from gossip import TRANSPORTS, GossipDataParallel, launch
from topologies.topology import FAMILIES


def test_added_topology_is_built_by_its_name_and_agrees_after_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    defined("docs/extending/topology.md", 0)
    topology = topologies.build("two_halves", 8)
    product = topology.round(1).matrix() @ topology.round(0).matrix()
    np.testing.assert_allclose(product, np.full((8, 8), 1 / 8), atol=1e-15)
    with pytest.raises(ValueError, match="world_size must be even for two halves, got 5"):
        topologies.build("two_halves", 5)


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


def train_with(folder: Path | None, compression: str | None) -> list[torch.Tensor]:
    transport = "distributed"
    if folder is not None:
        transport = "folder"
        TRANSPORTS.register(transport)(
            functools.partial(defined("docs/extending/transport.md", 0)["FolderTransport"], folder=folder)
        )
    model = GossipDataParallel(
        rank_module(), SGD, "ring", bucket_cap_mb=TINY_BUCKETS, compression=compression, transport=transport
    )
    train(model, range(4))
    found = list(snapshot(model).values())
    model.close()
    return found


@pytest.mark.parametrize("compression", [None, "int8"])
def test_added_transport_carries_what_ours_carries(tmp_path: Path, compression: str | None) -> None:
    added, usual = (launch(train_with, folder, compression, world_size=3) for folder in (tmp_path, None))
    for own, expected in zip(added, usual, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))
    assert list(tmp_path.iterdir()) == []

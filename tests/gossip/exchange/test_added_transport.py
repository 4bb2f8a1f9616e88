"""The transport of docs/extending/transport.md works as it stands there."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from examples import defined
from replicas import SGD, TINY_BUCKETS, rank_module, snapshot, train

from gossip import TRANSPORTS, GossipDataParallel, launch


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

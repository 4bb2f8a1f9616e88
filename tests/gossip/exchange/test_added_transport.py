"""The transport of docs/extending/transport.md works as it stands there."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples import defined
from replicas import SGD, TINY_BUCKETS, rank_module, snapshot, train

from gossip import TRANSPORTS, ExchangeError, GossipDataParallel, launch


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


def wait_in_vain(folder: Path) -> str:
    transport = functools.partial(defined("docs/extending/transport.md", 0)["FolderTransport"], folder=folder)
    model = GossipDataParallel(rank_module(), SGD, "ring", transport=transport)
    model.world.timeout = timedelta(seconds=1)  # once both are there
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(ExchangeError) as caught:
            train(model, range(2))
        text = str(caught.value)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return text


def test_added_transport_names_who_did_not_send(tmp_path: Path) -> None:
    first, _ = launch(wait_in_vain, tmp_path, world_size=2)
    assert "rank 0: step 0, bucket 0: no message from rank 1" in first

"""Meshes and modules that do not fit each other, on all ranks or on one: every rank gets an error, in one line."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, on_ranks, run_ranks
from sharded_models import ADAMW, make_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gossip import ExchangeError, GossipDataParallel, ManifestError

TIMEOUT = timedelta(seconds=2)
NAMES = ("gossip", "shard")


def sharded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])


def wrap(module: nn.Module, mesh: DeviceMesh, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(
        module, **{"optimizer": ADAMW, "topology": "ring", "mesh": mesh, "timeout": TIMEOUT, **options}
    )


def over_a_transposed_mesh() -> None:
    wrap(sharded(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES)), make_mesh(2, 2))


def with_swapped_names() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES[::-1])
    wrap(sharded(mesh), mesh)


def on_the_meta_device() -> None:
    mesh = make_mesh(2, 2)
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    wrap(fully_shard(module, mesh=mesh["shard"]), mesh)


REFUSED: dict[Callable[[], None], str] = {
    over_a_transposed_mesh: r"^mesh: .* over the ranks \[[01], [23]\], which are not those of .*, \[[02], [13]\]",
    with_swapped_names: r"^mesh must have .*'gossip', 'shard'., got .'shard', 'gossip'.; make it by gossip.make_sh",
    on_the_meta_device: "^parameter 'weight' is on the meta device; materialise the module",
}
"""What all ranks do, and the error that they all get."""


@on_ranks(4)
def test_meshes_that_are_not_the_modules_are_refused_in_one_line() -> None:
    for make, text in REFUSED.items():
        with pytest.raises(ValueError, match=text) as caught:
            make()
        assert "\n" not in str(caught.value)


ODD_RANK = 1


def other_clipping(mesh: DeviceMesh) -> None:
    wrap(sharded(mesh), mesh, clip_grad_norm=1.0 if dist.get_rank() == ODD_RANK else None)


def unknown_topology(mesh: DeviceMesh) -> None:
    wrap(sharded(mesh), mesh, topology="moebius" if dist.get_rank() == ODD_RANK else "ring")


def other_layers(mesh: DeviceMesh) -> None:
    module = nn.Linear(4, 6 if dist.get_rank() < 2 else 4)
    wrap(fully_shard(module, mesh=mesh["shard"]), mesh)


def not_sharded(mesh: DeviceMesh) -> None:
    module = sharded(mesh)
    wrap(nn.Linear(4, 4) if dist.get_rank() == ODD_RANK else module, mesh)


def other_shards(mesh: DeviceMesh) -> None:
    shard = "none" if dist.get_rank() < 2 else "optimizer"
    wrap(nn.Linear(2, 2), mesh, shard=shard)


def other_rates(mesh: DeviceMesh) -> None:
    rate = 0.1 + 0.1 * (dist.get_rank() == ODD_RANK)
    wrap(nn.Linear(2, 2), mesh, shard="none", optimizer=partial(torch.optim.SGD, lr=rate))


UNEQUAL: dict[Callable[[DeviceMesh], None], str] = {
    other_clipping: "clip_grad_norm is none on rank 0, but 1 ",
    unknown_topology: "unknown topology 'moebius'",
    other_layers: "[2, 4]",
    not_sharded: "the module is not sharded",
    other_shards: "replica is a group's, with shard='none' on rank 0, but a group's, with shard='optimizer' on",
    other_rates: "optimizer 1 group 1 is",
}


def make_unequally(make: Callable[[DeviceMesh], None]) -> str:
    return error_of((ValueError, ManifestError, ExchangeError), make, make_mesh(2, 2))


@pytest.mark.parametrize("make", UNEQUAL)
def test_ranks_that_are_built_unequally_all_get_an_error(make: Callable[[DeviceMesh], None]) -> None:
    """Those of other groups, and of the same group, too; within the time-out."""
    texts = run_ranks(make_unequally, make, world_size=4)
    assert UNEQUAL[make] in texts[ODD_RANK]
    for rank, text in enumerate(texts):
        assert "\n" not in text
        told = UNEQUAL[make] in text
        assert told or f"rank {ODD_RANK} is absent" in text or "rank 0 is absent" in text, (rank, text)

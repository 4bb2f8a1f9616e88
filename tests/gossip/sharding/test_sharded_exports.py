"""Exports of replicas that are sharded over groups: rows and columns are joined, and failures end on all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_loops import make_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import gossip
from gossip import GossipDataParallel
from gossip.parameters import digests

ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Columns(nn.Module):
    """Parameters of which shards hold rows, some of them none, and others of which they hold columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Linear(8, 3)
        self.few_rows = nn.Parameter(torch.randn(1, 8))
        self.kernel = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.cut(x * self.few_rows) + self.kernel.sum((1, 2))
        return y


def export_columns(ranks_per_group: int, chunk_bytes: int, folder: Path) -> dict[str, torch.Tensor]:
    module = Columns()
    mesh = make_mesh(2, ranks_per_group)
    in_columns = (module.cut.weight, module.kernel)
    fully_shard(
        module,
        mesh=mesh["shard"],
        shard_placement_fn=lambda parameter: Shard(1) if any(parameter is each for each in in_columns) else None,
    )
    with GossipDataParallel(module, ADAMW, "ring", mesh=mesh) as model, pytest.MonkeyPatch.context() as patch:
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(4, 8, generator=generator)).square().sum().backward()
        patch.setattr(digests, "CHUNK_BYTES", chunk_bytes)
        gossip.export(model, folder / "model.safetensors")
        with model.averaged():
            return {name: values.full_tensor().clone() for name, values in model.module.state_dict().items()}


@pytest.mark.parametrize(("ranks_per_group", "chunk_bytes"), [(2, 4), (2, 20), (4, 44), (2, 2**20)])
def test_export_joins_rows_and_columns(ranks_per_group: int, chunk_bytes: int, tmp_path: Path) -> None:
    averages = run_ranks(export_columns, ranks_per_group, chunk_bytes, tmp_path, world_size=2 * ranks_per_group)
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert exported.keys() == averages[0].keys()
    for name, values in averages[0].items():
        assert torch.equal(exported[name], values), name

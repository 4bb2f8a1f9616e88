"""Checkpoints and exports of replicas that are sharded over groups: resumed, and divided anew."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import run_ranks
from replicas import assert_equal_states
from sharded_models import ADAMW, MeshShape, make_mesh, make_sharded, values_of
from tiers import rest_is_slow
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import gossip
from gossip import GossipDataParallel
from gossip.parameters import digests


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.tanh, self.last = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)


def make_model(
    shape: MeshShape, algorithm: str = "adapt_while_communicating", shard: str = "fsdp"
) -> GossipDataParallel:
    """Of ``shape``; with one rank in each group, without a mesh."""
    module, options = (Net(), {}) if shape[1] == 1 else make_sharded(Net(), shape, shard, ("first",))
    return GossipDataParallel(module, ADAMW, "ring", algorithm=algorithm, **options)


def train(model: GossipDataParallel, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()


def save_and_go_on(
    shape: MeshShape, algorithm: str, folder: Path, shard: str = "fsdp"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with make_model(shape, algorithm, shard) as model:
        train(model, range(3))
        gossip.save(model, folder, batch=3)
        with model.averaged():
            average = values_of(model.module)
        moments = model.optimizer.state_dict()["state"][0]["exp_avg"].clone()
        train(model, range(3, 6))
        return values_of(model.module), average, moments


def load_and_go_on(shape: MeshShape, algorithm: str, folder: Path, shard: str) -> torch.Tensor:
    with make_model(shape, algorithm, shard) as model:
        train(model, range(2))
        found = gossip.load(model, folder)
        assert (found.step, found.data["batch"], model.step) == (3, 3, 3)
        train(model, range(3, 6))
        return values_of(model.module)


@pytest.mark.parametrize(
    ("algorithm", "shard"),
    [("adapt_while_communicating", "optimizer"), ("adapt_then_combine", "none"), ("integral_correction", "fsdp")],
)
def test_groups_resume_bit_for_bit(algorithm: str, shard: str, tmp_path: Path) -> None:
    wanted = run_ranks(save_and_go_on, (2, 2), algorithm, tmp_path, shard, world_size=4)
    found = run_ranks(load_and_go_on, (2, 2), algorithm, tmp_path, shard, world_size=4)
    for values, (after, _, _) in zip(found, wanted, strict=True):
        assert torch.equal(values, after)


def load(shape: MeshShape, folder: Path, shard: str = "fsdp") -> tuple[torch.Tensor, torch.Tensor]:
    with make_model(shape, shard=shard) as model:
        gossip.load(model, folder)
        moments = model.optimizer.state_dict()["state"][0]["exp_avg"].clone()
        values = values_of(model.module)
        train(model, range(3, 5))
        assert model.step == 5
        return values, moments


@pytest.mark.parametrize(
    ("before", "after"),
    rest_is_slow([((2, 2), (1, 3)), ((2, 3), (2, 2)), ((2, 1), (2, 2)), ((2, 2), (3, 1))]),
    ids=lambda shape: f"{shape[0]}x{shape[1]}",
)
def test_other_numbers_of_groups_and_shards_start_from_the_mean(
    before: MeshShape, after: MeshShape, tmp_path: Path
) -> None:
    saved = run_ranks(save_and_go_on, before, "adapt_while_communicating", tmp_path, world_size=before[0] * before[1])
    found = run_ranks(load, after, tmp_path, world_size=after[0] * after[1])
    for values, _ in found:
        torch.testing.assert_close(values, saved[0][1], rtol=0, atol=1e-6)
    old = torch.stack(
        [
            torch.cat([saved[group * before[1] + place][2] for place in range(before[1])])[:7]
            for group in range(before[0])
        ]
    ).mean(0)
    new = torch.cat([moments for _, moments in found[: after[1]]])[:7]
    torch.testing.assert_close(new, old, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [
        ("none", "fsdp", (2, 2)),
        ("optimizer", "none", (2, 2)),
        ("fsdp", "optimizer", (2, 2)),
        ("none", "none", (1, 4)),
        ("none", "none", (4, 1)),
    ],
)
def test_groups_that_share_a_replica_otherwise_start_from_the_mean(
    before: str, after: str, shape: MeshShape, tmp_path: Path
) -> None:
    saved = run_ranks(save_and_go_on, (2, 2), "adapt_while_communicating", tmp_path, before, world_size=4)
    for values, _ in run_ranks(load, shape, tmp_path, after, world_size=4):
        torch.testing.assert_close(values, saved[0][1], rtol=0, atol=1e-6)


def load_even(folder: Path, before: str, after: str) -> list[torch.Tensor]:
    """Of a module whose rows the ranks of a group divide evenly: what was saved, and what was loaded."""
    found = []
    for shard in (before, after):
        module, options = make_sharded(nn.Linear(6, 8, bias=False), (2, 2), shard)
        with GossipDataParallel(module, ADAMW, "ring", **options) as model:
            if shard == before:
                train(model, range(3))
                gossip.save(model, folder)
            else:
                gossip.load(model, folder)
            found.append(values_of(model.module))
    return found


@pytest.mark.parametrize(("before", "after"), [("fsdp", "optimizer"), ("optimizer", "fsdp")])
def test_shards_of_equal_shapes_keep_the_replica_of_each_group(before: str, after: str, tmp_path: Path) -> None:
    groups = run_ranks(load_even, tmp_path, before, after, world_size=4)
    for saved, loaded in groups:
        assert torch.equal(loaded, saved)
    assert not torch.equal(groups[0][0], groups[2][0]), "the groups differ"


def export(folder: Path, shard: str) -> dict[str, torch.Tensor]:
    with make_model((2, 2), shard=shard) as model:
        train(model, range(3))
        gossip.export(model, folder / "model.safetensors")
        with model.averaged():
            state = model.module.state_dict()
            return {
                name: (values.full_tensor() if hasattr(values, "full_tensor") else values).clone()
                for name, values in state.items()
            }


@pytest.mark.parametrize("shard", ["fsdp", "optimizer", "none"])
def test_export_is_the_whole_averaged_model(shard: str, tmp_path: Path) -> None:
    averages = run_ranks(export, tmp_path, shard, world_size=4)
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert exported.keys() == averages[0].keys()
    for name, values in averages[0].items():
        torch.testing.assert_close(exported[name], values, rtol=0, atol=1e-6)
    net = Net()
    safetensors.torch.load_model(net, tmp_path / "model.safetensors")


class Columns(nn.Module):
    """Parameters of which shards hold rows, some of them none, and others of which they hold columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Linear(8, 3)
        self.few_rows = nn.Parameter(torch.randn(1, 8))
        self.kernel = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x * self.few_rows) + self.kernel.sum((1, 2))


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
    assert_equal_states(safetensors.torch.load_file(tmp_path / "model.safetensors"), averages[0])

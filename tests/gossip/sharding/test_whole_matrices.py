"""``shard="optimizer"`` with an optimizer that needs whole matrices: each has one rank of the group that updates it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_models import MeshShape, make_sharded, polar_factor, values_of
from small_runs import finish, optimizers_of
from tiers import rest_is_slow
from torch import nn

import gossip
from gossip import GossipDataParallel

SIZES = (6, 9, 4, 5, 5, 3)


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        pairs = itertools.pairwise(SIZES)
        super().__init__(*(nn.Sequential(nn.Linear(*each), nn.Tanh()) for each in pairs))
        self.frozen = nn.Linear(3, 40).requires_grad_(False)  # would be dealt first
        self[0].compile(backend="eager")
        self.double()


def muon_and_adamw(named: list[tuple[str, nn.Parameter]]) -> tuple[torch.optim.Optimizer, ...]:
    """Muon as it is, but for polar factors that are exact: those of bfloat16 differ where inputs do by a rounding."""
    torch.optim._muon._zeropower_via_newtonschulz = polar_factor
    matrices = [parameter for _, parameter in named if parameter.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW([p for _, p in named if p.ndim < 2], lr=0.01)


def adafactor(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Which cannot step over a parameter without values."""
    return torch.optim.Adafactor([parameter for _, parameter in named], lr=0.01)


def make_model(shape: MeshShape, shard: str, **options: Any) -> GossipDataParallel:
    module, of_mesh = make_sharded(Net(), shape, shard)
    arguments = {"optimizer": muon_and_adamw, "topology": "ring", "bucket_cap_mb": 3e-4} | options
    return GossipDataParallel(module, **arguments, **of_mesh)


def train(model: GossipDataParallel, steps: range) -> torch.Tensor:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, SIZES[0], generator=generator, dtype=torch.float64)).square().sum().backward()
        finish(model)
    model.state_dict()  # combines what is to be combined before the values are read
    return values_of(model.module)


def train_by(shard: str, shape: MeshShape, options: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """The values after some steps, and the sizes of the parameters of which the first optimizer keeps something."""
    with make_model(shape, shard, **options) as model:
        return train(model, range(5)), [parameter.numel() for parameter in optimizers_of(model)[0].state]


def train_in_both_ways(shape: MeshShape, options: dict[str, Any]) -> tuple[tuple[torch.Tensor, list[int]], ...]:
    return train_by("none", shape, options), train_by("optimizer", shape, options)


@pytest.mark.parametrize(
    ("shape", "options"),
    rest_is_slow(
        [
            ((2, 2), {"algorithm": gossip.DiLoCo(period=2), "topology": "complete"}),
            ((1, 3), {"clip_grad_norm": 0.5, "optimizer": adafactor}),
            ((2, 3), {"algorithm": "gradient_tracking", "compression": "int8"}),
            ((1, 4), {"step_in_backward": False, "optimizer": adafactor}),
            ((2, 4), {"compression": "powergossip"}),
        ]
    ),
)
def test_matrices_are_updated_as_by_ranks_that_have_all(shape: MeshShape, options: dict[str, Any]) -> None:
    outcomes = run_ranks(train_in_both_ways, shape, options, world_size=shape[0] * shape[1])
    is_exact = "compression" not in options  # a message is rounded as a whole, and ranks send others
    sizes = outcomes[0][0][1]
    for (wanted, _), (found, _) in outcomes:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 if is_exact else 0.1)
    kept = [of_rank for _, (_, of_rank) in outcomes[: shape[1]]]
    assert sorted(numel for each in kept for numel in each) == sorted(sizes), "each is whole, and on one rank"
    assert max(map(sum, kept)) <= max(max(sizes), sum(sizes) / shape[1] + min(sizes)), "and they are balanced"


def save(shape: MeshShape, folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with make_model(shape, "optimizer") as model:
        train(model, range(3))
        gossip.save(model, folder)
        gossip.export(model, folder / "averaged.safetensors")
        with model.averaged():
            average = values_of(model.module)
        return average, train(model, range(3, 6)), momentum_of(model)


def load(shape: MeshShape, shard: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with make_model(shape, shard) as model:
        gossip.load(model, folder)
        loaded, momentum = values_of(model.module), momentum_of(model)
        return loaded, train(model, range(3, 6)), momentum


def momentum_of(model: GossipDataParallel) -> torch.Tensor:
    """All of what this rank keeps, summed."""
    state = model.optimizer[0].state
    return torch.stack([state[each]["momentum_buffer"].sum() for each in state if each.numel()]).sum()


def test_a_checkpoint_continues_and_is_dealt_anew(tmp_path: Path) -> None:
    saved = run_ranks(save, (2, 2), tmp_path, world_size=4)
    for (_, after, _), (_, wanted, _) in zip(
        run_ranks(load, (2, 2), "optimizer", tmp_path, world_size=4), saved, strict=True
    ):
        assert torch.equal(after, wanted)
    exported = safetensors.torch.load_file(tmp_path / "averaged.safetensors")
    whole = torch.cat([exported[name].flatten() for name, _ in Net().named_parameters()])
    torch.testing.assert_close(whole, saved[0][0], rtol=0, atol=1e-12)
    sums = []
    for shape, shard in (((1, 2), "none"), ((1, 3), "optimizer")):
        loaded = run_ranks(load, shape, shard, tmp_path, world_size=shape[1])
        for values, _, _ in loaded:
            torch.testing.assert_close(values, saved[0][0], rtol=0, atol=1e-12)
        sums.append(sum(float(momentum) for _, _, momentum in loaded) / (shape[1] if shard == "none" else 1))
    assert sums[0] == pytest.approx(sums[1], abs=1e-12)
    back = tmp_path / "none"
    run_ranks(save_undivided, back, world_size=2)
    (first, _, momentum), *others = run_ranks(load, (1, 2), "optimizer", back, world_size=2)
    assert len(others) == 1
    assert torch.equal(first, others[0][0])
    assert float(momentum) != 0


def save_undivided(folder: Path) -> None:
    with make_model((1, 2), "none") as model:
        train(model, range(3))
        gossip.save(model, folder)

"""Sharded modules of which a part is frozen, and what happens when that changes; tied weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_loops import ADAMW, assert_trains_as_by_hand, loop_over, make_mesh
from sharded_models import values_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gossip import GossipDataParallel, GossipError

NUM_STEPS = 4


class Adapted(nn.Module):
    """A frozen layer beside a trained adapter of low rank (LoRA)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y.tanh()


class AdaptedNet(nn.Module):
    """Between the adapted layers lies one that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(5, 7).requires_grad_(False)
        self.layers = nn.Sequential(Adapted(7), nn.Linear(7, 7).requires_grad_(False), Adapted(7))
        self.head = nn.Linear(7, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.layers(self.embedding(x)))
        return y


def make_adapted(mesh: DeviceMesh) -> AdaptedNet:
    module = AdaptedNet()
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    return module


UNFROZEN = ["layers.1.weight", "embedding.bias"]
"""A group's own, and one of which not every rank of three has rows."""


def full(parameter: nn.Parameter) -> torch.Tensor:
    values: torch.Tensor = parameter.full_tensor()  # type: ignore[attr-defined]
    return values.detach().clone()


def unfreeze(name: str) -> str:
    mesh = make_mesh(1, 3)
    module = make_adapted(mesh)
    parameter = dict(module.named_parameters())[name]
    x = torch.ones(3, 5)
    with GossipDataParallel(module, ADAMW, "ring", mesh=mesh) as model:
        model(x).square().sum().backward()
        parameter.requires_grad_(True)
        with pytest.raises(GossipError) as caught:
            model(x)
    # As the text advises:
    with GossipDataParallel(module, ADAMW, "ring", mesh=mesh) as model:
        before = full(parameter)
        model(x).square().sum().backward()
        assert model.step == 1
        assert not torch.equal(full(parameter), before)
    return str(caught.value)


@pytest.mark.parametrize("name", UNFROZEN)
def test_parameters_that_are_unfrozen_after_wrapping_are_refused_at_the_next_forward(name: str) -> None:
    for text in run_ranks(unfreeze, name, world_size=3):
        assert text.startswith(f"parameter {name!r} was unfrozen after the module was wrapped")
        assert "close() the model and wrap the module again" in text


class Tied(nn.Module):
    """The output layer has the embedding's weights, and a layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 5)
        self.middle = nn.Linear(5, 5)
        self.between = nn.Linear(5, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.embedding(tokens)).tanh()
        y: torch.Tensor = self.head(self.middle(self.between(x)).tanh())
        return y


def train_tied(by_hand: bool) -> torch.Tensor:
    mesh = make_mesh(1, dist.get_world_size())
    module = Tied()
    fully_shard(module.between, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    with loop_over(module, mesh, by_hand=by_hand) as (model, end_step):
        for step in range(NUM_STEPS):
            tokens = (torch.arange(4) + step + dist.get_rank()) % 9
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
            end_step()
        assert module.head.weight is module.embedding.weight
        return values_of(module)


def test_tied_weights_and_layers_that_are_used_twice_train_as_by_hand_bit_for_bit() -> None:
    assert_trains_as_by_hand(train_tied, world_size=2)

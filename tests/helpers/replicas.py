"""Modules with everything in them, and what tests do with their replicas."""

import functools
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossip import GossipDataParallel

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TINY_BUCKETS = 71 / 2**20


class NormalisedNet(nn.Module):
    """With float, integer and boolean buffers, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("level", torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))) * self.frozen.sum()


class Awkward(nn.Module):
    """Frozen, tied, unused, scalar, empty, half, transposed and channels_last parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.unused = nn.Linear(2, 5)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.filters = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.third(self.second(self.first(inputs * self.frozen)))) * self.scalar
        image = (hidden @ self.transposed * self.brief)[..., None, None].expand(-1, -1, 2, 2)
        return nn.functional.conv2d(image, self.filters) + self.empty.sum()


def saved(content: object) -> bytes:
    """What ``torch.save`` makes of it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def rank_module(seed: int = 0) -> NormalisedNet:
    """Another initialisation on every rank."""
    torch.manual_seed(seed + dist.get_rank())
    module = NormalisedNet()
    with torch.no_grad():
        module.level.fill_(dist.get_rank() + 1)
        module.frozen.fill_(dist.get_rank() + 1)
    return module


def train(model: GossipDataParallel, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * model.rank + step)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()


def snapshot(model: GossipDataParallel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def assert_equal_states(found: Any, wanted: Any, where: str = "state") -> None:
    """Bit by bit."""
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_equal_states(found[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_equal_states(one, other, f"{where}[{place}]")
    else:
        assert (type(found), found) == (type(wanted), wanted), where


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.stack(rows)

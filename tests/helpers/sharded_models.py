"""Small models that are sharded over groups of ranks, whose ranks have gradients of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from quadratics import NUM_VALUES, Problem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MeshShape = tuple[int, int]
"""How many groups there are, and how many ranks in each."""

Module = TypeVar("Module", bound=nn.Module)


class Quadratic(nn.Module):
    """0.5 |A x - b|^2, or that + slope x, with x in two parameters: of four values, and of three."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(start[:4]))
        self.second = nn.Parameter(torch.tensor(start[4:]))

    def forward(self, matrix: torch.Tensor, target: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.cat([self.first, self.second])
        loss: torch.Tensor = 0.5 * ((matrix @ x - target) ** 2).sum(-1)
        return loss if slope is None else loss + slope @ x


def make_sharded(
    module: Module, shape: MeshShape, shard: str = "fsdp", parts: Iterable[str] = ()
) -> tuple[Module, dict[str, Any]]:
    """Shard a module over the groups of a mesh, and before it these parts of it, if ``shard`` is "fsdp".

    Returns the module, and what the wrapper is told. Collective.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("gossip", "shard"))
    if shard != "fsdp":
        return module, {"mesh": mesh, "shard": shard}
    for part in (*map(module.get_submodule, parts), module):
        fully_shard(part, mesh=mesh["shard"])
    return module, {"mesh": mesh}


def batch(
    problem: Problem, group: int, place: int, ranks_per_group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one rank: the slopes of a group's ranks differ much, and add up to nothing."""
    slopes = np.random.default_rng(group).normal(size=(ranks_per_group, NUM_VALUES))
    slope = (slopes - slopes.mean(0))[place]
    return torch.tensor(problem.matrices[group]), torch.tensor(problem.targets[group]), torch.tensor(slope)


def values_of(module: nn.Module) -> torch.Tensor:
    """All values of the replica, gathered from its group. Collective over the group."""
    gathered = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in module.parameters()
    ]
    return torch.cat([values.detach().flatten() for values in gathered]).clone()

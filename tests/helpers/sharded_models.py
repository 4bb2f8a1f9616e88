"""Small models that are sharded over groups of ranks, and the same loop over them in two ways."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from quadratics import NUM_VALUES, Problem
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gossip import GossipDataParallel

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
        x = torch.cat([self.first.flatten(), self.second])
        loss: torch.Tensor = 0.5 * ((matrix @ x - target) ** 2).sum(-1)
        return loss if slope is None else loss + slope @ x


def polar_factor(matrix: torch.Tensor, *_: object) -> torch.Tensor:
    """That to which Muon's Newton-Schulz steps, which torch makes in bfloat16, converge."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def make_sharded(
    module: Module, shape: MeshShape, shard: str = "fsdp", parts: Iterable[str] = ()
) -> tuple[Module, dict[str, Any]]:
    """Shard a module over the groups of a mesh, and before it these parts of it, if ``shard`` is "fsdp".

    Returns the module, and what the wrapper is told. Collective.
    """
    mesh = make_mesh(*shape)
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


# ---------------------------------------------------------------------- by hand and by gossip, by groups and by ranks

ADAMW = partial(torch.optim.AdamW, lr=0.01)

Loop = tuple[nn.Module, Callable[[], None]]
"""What a loop calls, and what ends a step."""


def make_mesh(num_groups: int, ranks_per_group: int) -> DeviceMesh:
    """Return a mesh of consecutive ranks. Collective."""
    return init_device_mesh("cpu", (num_groups, ranks_per_group), mesh_dim_names=("gossip", "shard"))


@contextmanager
def loop_over(module: nn.Module, mesh: DeviceMesh, *, by_hand: bool, **options: Any) -> Iterator[Loop]:
    """Train a sharded module by an optimizer over its DTensors, or by a model whose backward passes make the steps."""
    if not by_hand:
        with GossipDataParallel(module, ADAMW, "ring", mesh=mesh, **options) as model:
            yield model, lambda: None
        return
    optimizer = ADAMW([parameter for parameter in module.parameters() if parameter.requires_grad])

    def end_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    yield module, end_step


def batches(num_steps: int, *shape: int) -> list[torch.Tensor]:
    """Of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(*shape, generator=generator) for _ in range(num_steps)]


def assert_trains_as_by_hand(train: Callable[..., torch.Tensor], *args: Any, world_size: int) -> None:
    """``train(by_hand, *args)`` returns the same bits on all ranks of a group, by hand or not."""
    outcomes = run_ranks(_train_both_ways, train, args, world_size=world_size)
    wanted, _ = outcomes[0]
    for _, found in outcomes:
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def _train_both_ways(train: Callable[..., torch.Tensor], args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return train(True, *args), train(False, *args)


def groups_and_ranks(train: Callable[..., Any], *args: Any) -> list[tuple[Any, Any]]:
    """By rank what ``train(True, *args)`` returns in two groups of two, and ``train(False, *args)`` on two ranks.

    The second is that of the rank that sees what the group of the first sees.
    """
    wanted = run_ranks(train, False, *args, world_size=2)
    return [(found, wanted[rank // 2]) for rank, found in enumerate(run_ranks(train, True, *args, world_size=4))]

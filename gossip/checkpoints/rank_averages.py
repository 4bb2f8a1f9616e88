"""The mean over the ranks of a distributed run, chunk by chunk, held by rank 0 only."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import torch
from torch import nn

from gossip.checkpoints.all_or_none import compare, together
from gossip.checkpoints.checkpoint_layout import describe_tensor, exported_tensors
from gossip.checkpoints.replicas import Replicas
from gossip.communication.world import World
from gossip.errors import CheckpointError
from gossip.parameters.buffers import is_averaged
from gossip.parameters.digests import chunks_in_memory_order, digest_of, memory_order
from gossip.step.engine import StepEngine


def averages_over_ranks(replicas: Replicas, engine: StepEngine, world: World, path: Path) -> dict[str, torch.Tensor]:
    """Implement :meth:`Replicas.averages`. Rank 0 holds the result, the others a chunk of it at a time."""
    module = engine.module
    engine.frozen.compare()
    equal = engine.frozen.names_of_equal()
    digests = together(replicas, "gossip.export", lambda: _begin(module, path, world.rank, equal))
    tensors = dict(exported_tensors(module))
    entries = {name: f"{describe_tensor(tensor)} strides {list(tensor.stride())}" for name, tensor in tensors.items()}
    compare(replicas, entries, "comparing what is exported")
    averages: dict[str, torch.Tensor] = {}
    weights = engine.weights()
    are_equal = len(set(digests)) == 1
    with engine.fatal():
        for name, tensor in tensors.items():
            if are_equal or name in equal or not is_averaged(tensor):
                average = tensor.cpu() if world.rank == 0 else None
            else:
                average = _average(tensor, world, f"averaging {name!r}", weights.get(name, 1.0))
            if average is not None:
                averages[name] = average.contiguous()
    return averages


def _begin(module: nn.Module, path: Path, rank: int, equal: Container[str]) -> str:
    """Check that rank 0 can write, and return a hash of everything that is not known to be equal on all ranks."""
    if rank == 0 and not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a folder; create it first")
    exported = exported_tensors(module)
    return digest_of(tensor for name, tensor in exported if name not in equal and is_averaged(tensor)).hex()


def _average(tensor: torch.Tensor, world: World, what: str, weight: float) -> torch.Tensor | None:
    """Return the mean over ranks, on the CPU of rank 0, computed in chunks; this rank's values count ``weight``."""
    result = torch.empty(tensor.numel(), dtype=tensor.dtype) if world.rank == 0 else None
    place = 0
    for chunk in chunks_in_memory_order(tensor):
        wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32), copy=True)
        if weight != 1.0:
            wide.mul_(weight)
        world.average_(torch.view_as_real(wide) if wide.is_complex() else wide, what)
        if result is not None:
            result[place : place + len(chunk)].copy_(wide)
        place += len(chunk)
    if result is None:
        return None
    order = memory_order(tensor)
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    return result.view([tensor.shape[dim] for dim in order]).permute(inverse)

"""The mean over the ranks of a distributed run, tensor by tensor and chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import torch
from torch import nn

from gossip.checkpoints.collective_errors import compare, run_on_all_ranks
from gossip.checkpoints.model_description import describe_tensor, exported_tensors
from gossip.checkpoints.replicas import Replicas
from gossip.communication.world import World
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import is_averaged
from gossip.parameters.digests import chunks_in_memory_order, digest_of, memory_order
from gossip.parameters.names import named_buffers, named_parameters
from gossip.step.engine import StepEngine


class Mean(NamedTuple):
    """The mean of one tensor over the ranks.

    Attributes
    ----------
    name : str
        The name of the tensor.
    tensor : Tensor
        This rank's, from which the mean has shape, dtype and the order of elements in memory.
    chunks : iterator of Tensor
        The mean, flat, in that order, up to 16 MiB at a time. Of what is not averaged, this rank's values. Collective.
    """

    name: str
    tensor: torch.Tensor
    chunks: Iterator[torch.Tensor]

    def assemble(self, *, is_kept: bool) -> torch.Tensor | None:
        """Return the whole mean, on the CPU, or None unless it ``is_kept`` on this rank. Collective."""
        result = torch.empty(self.tensor.numel() if is_kept else 0, dtype=self.tensor.dtype)
        place = 0
        for chunk in self.chunks:
            if is_kept:
                result[place : place + len(chunk)].copy_(chunk)
            place += len(chunk)
        if not is_kept:
            return None
        order = memory_order(self.tensor)
        inverse = sorted(range(self.tensor.dim()), key=order.__getitem__)
        return result.view([self.tensor.shape[dim] for dim in order]).permute(inverse)


def means_over_ranks(replicas: Replicas, engine: StepEngine, world: World) -> Iterator[Mean]:
    """Return the mean of each exported tensor, to be taken in turn, every one completely. Collective.

    Raises ManifestError: the ranks' tensors differ in shape, dtype or strides.
    """
    module = engine.module
    engine.frozen.compare()
    equal = engine.frozen.names_of_equal()
    digests = run_on_all_ranks(replicas, "gossip.export", lambda: _digest(module, equal))
    tensors, averaged = dict(exported_tensors(module)), _averaged(module)
    entries = {name: f"{describe_tensor(tensor)} strides {list(tensor.stride())}" for name, tensor in tensors.items()}
    compare(replicas, entries, "comparing what is exported")
    size = len(digests) // world.world_size  # how many ranks share a replica: theirs need not be equal to each other
    are_equal = all(digest == digests[number % size] for number, digest in enumerate(digests))
    weights = engine.weights()

    def average_(name: str) -> Callable[[torch.Tensor], None] | None:
        if are_equal or name in equal or name not in averaged:
            return None
        return lambda wide: _average_(wide, engine, world, f"averaging {name!r}", weights.get(name, 1.0))

    return (Mean(name, tensor, _chunks(tensor, average_(name))) for name, tensor in tensors.items())


def _digest(module: nn.Module, equal: Container[str]) -> str:
    """Return a hash of everything that is not known to be equal on all ranks."""
    averaged, exported = _averaged(module), exported_tensors(module)
    return digest_of(tensor for name, tensor in exported if name not in equal and name in averaged).hex()


def _averaged(module: nn.Module) -> set[str]:
    """Return the names of what has a mean."""
    names = {name for name, parameter in named_parameters(module) if is_mixable(parameter)}
    return names | {name for name, buffer in named_buffers(module) if is_averaged(buffer)}


def _chunks(tensor: torch.Tensor, average_: Callable[[torch.Tensor], None] | None) -> Iterator[torch.Tensor]:
    for chunk in chunks_in_memory_order(tensor):
        if average_ is None:
            yield chunk
        else:
            wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32), copy=True)
            average_(wide)
            yield wide.to(chunk.dtype)


def _average_(wide: torch.Tensor, engine: StepEngine, world: World, what: str, weight: float) -> None:
    """Replace the values by their mean over ranks; this rank's count ``weight``."""
    if weight != 1.0:
        wide.mul_(weight)
    with engine.fatal():
        world.average_(torch.view_as_real(wide) if wide.is_complex() else wide, what)

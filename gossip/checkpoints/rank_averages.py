"""The mean over the ranks of a distributed run, tensor by tensor and chunk by chunk, from whole ranks or shards."""

import math
from collections.abc import Container, Iterator
from typing import NamedTuple

import torch
from torch import nn

from gossip.checkpoints.model_description import Divisions, describe_part, exported_tensors
from gossip.checkpoints.replicas import Replicas, compare, run_on_all_ranks
from gossip.communication.world import World
from gossip.parameters import digests
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import as_real, is_averaged
from gossip.parameters.digests import chunks_in_memory_order, digest_of, memory_order
from gossip.parameters.global_average import shares
from gossip.parameters.names import named_buffers, named_parameters
from gossip.sharding.local_group import PartitionedGroup
from gossip.sharding.shard_mesh import Division
from gossip.step.engine import StepEngine


class Mean(NamedTuple):
    """The mean of one tensor over the ranks."""

    name: str
    tensor: torch.Tensor
    """This rank's, from which the mean has shape, dtype and the order of elements in memory."""
    chunks: Iterator[torch.Tensor]
    """The mean, of what is not averaged this rank's values: flat, in that order, up to 16 MiB each. Collective."""

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


def means_over_ranks(replicas: Replicas, engine: StepEngine, world: World, divisions: Divisions) -> Iterator[Mean]:
    """Return the mean of each exported tensor, to be taken in turn, every one completely. Collective.

    Raises ManifestError: the ranks' tensors differ in shape, dtype or strides.
    """
    module = engine.module
    engine.frozen.compare()
    equal = engine.frozen.names_of_equal()
    digests = run_on_all_ranks(replicas, "gossip.export", lambda: _digest(module, equal))
    tensors, averaged = dict(exported_tensors(module)), _averaged(module)
    uneven = {name: each for name, each in divisions.items() if not each.is_even}
    entries = {
        name: f"{describe_part(tensor, uneven.get(name))} strides {list(tensor.stride())}"
        for name, tensor in tensors.items()
    }
    compare(replicas, entries, "comparing what is exported")
    size = len(digests) // world.world_size  # how many ranks share a replica: theirs need not be equal to each other
    are_equal = all(digest == digests[number % size] for number, digest in enumerate(digests))
    weights = shares(engine.weights(), world)

    def chunks(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        is_averaged, weight = not are_equal and name not in equal and name in averaged, weights.get(name, 1.0)
        for chunk in chunks_in_memory_order(tensor):
            if not is_averaged:
                yield chunk
                continue
            wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32), copy=True)
            if weight != 1.0:
                wide.mul_(weight)
            with engine.fatal():
                world.average_(as_real(wide), f"averaging {name!r}")
            yield wide.to(chunk.dtype)

    return (Mean(name, tensor, chunks(name, tensor)) for name, tensor in tensors.items())


def _digest(module: nn.Module, equal: Container[str]) -> str:
    """Return a hash of everything that is not known to be equal on all ranks."""
    averaged, exported = _averaged(module), exported_tensors(module)
    return digest_of(tensor for name, tensor in exported if name not in equal and name in averaged).hex()


def _averaged(module: nn.Module) -> set[str]:
    """Return the names of what has a mean."""
    names = {name for name, parameter in named_parameters(module) if is_mixable(parameter)}
    return names | {name for name, buffer in named_buffers(module) if is_averaged(buffer)}


def gather_shards(mean: Mean, division: Division, group: PartitionedGroup) -> torch.Tensor | None:
    """Return the shards as one, without what pads them, on the group's first rank. Collective over the group.

    Every rank has the ``mean`` of its own shard.
    """
    num_shards, is_first = group.num_shards, group.rank == 0
    shape, dtype, dimension = mean.tensor.shape, mean.tensor.dtype, division.dimension
    whole = torch.empty(division.whole_shape(shape) if is_first else [0], dtype=dtype)
    rows = whole.view(math.prod(shape[:dimension]), -1) if whole.numel() else whole
    inner = math.prod(shape[dimension + 1 :])
    chunk_numel = max(1, digests.CHUNK_BYTES // dtype.itemsize)
    piece_numel = max(1, chunk_numel // num_shards)  # all shards of a piece together are a chunk
    pieces = (piece for chunk in mean.chunks for piece in chunk.split(piece_numel) if len(piece))
    longest = max(division.lengths) * math.prod(shape[:dimension]) * inner
    chunks = (range(first, min(first + chunk_numel, longest)) for first in range(0, longest, chunk_numel))
    for start in (start for chunk in chunks for start in chunk[::piece_numel]):
        piece = next(pieces, torch.empty(0, dtype=dtype))
        payload = bytes(piece.cpu().contiguous().view(torch.uint8).numpy())
        payloads = group.world.gather_bytes(payload, f"gathering {mean.name!r}")
        if is_first:
            for place, each in enumerate(payloads):
                if each:
                    values = torch.frombuffer(bytearray(each), dtype=torch.uint8).view(dtype)
                    _place_(rows, values, start, division.starts[place] * inner, division.lengths[place] * inner)
    return whole if is_first else None


def _place_(rows: torch.Tensor, values: torch.Tensor, start: int, begin: int, width: int) -> None:
    """Write consecutive elements of a shard, from ``start`` on, where they belong in the whole tensor.

    Parameters
    ----------
    rows : Tensor, [num_rows, numel]
        The whole, flattened before and after the dimension along which it is divided, without room for padding.
    begin : int
        Where the part of the shard, which is flattened [num_rows, width], begins in each row.
    """
    stop = start + len(values)
    for row in range(start // width, -(-stop // width)):
        first, last = max(start, row * width), min(stop, (row + 1) * width)
        target = rows[row, begin + first - row * width : begin + last - row * width]
        target.copy_(values[first - start :][: len(target)])

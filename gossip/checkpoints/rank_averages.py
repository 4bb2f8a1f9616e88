"""The mean over the ranks of a distributed run, tensor by tensor and chunk by chunk, from whole ranks or shards."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gossip.checkpoints.model_description import describe_tensor, exported_tensors
from gossip.checkpoints.replicas import Replicas, compare, run_on_all_ranks
from gossip.communication.world import World
from gossip.parameters import digests
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import as_real, is_averaged
from gossip.parameters.digests import chunks_in_memory_order, digest_of, memory_order
from gossip.parameters.global_average import shares
from gossip.parameters.names import named_buffers, named_parameters
from gossip.sharding.local_group import PartitionedGroup
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


def whole_shape(shape: Sequence[int], dimension: int, length: int) -> list[int]:
    """Return the shape of a tensor that is divided along ``dimension``, from that of a shard and its length there."""
    return [length if place == dimension else size for place, size in enumerate(shape)]


def gather_shards(mean: Mean, dimension: int, length: int, group: PartitionedGroup) -> torch.Tensor | None:
    """Return the shards as one, without what pads them, on the group's first rank. Collective over the group.

    Every rank has the ``mean`` of its own shard, padded to the size of the first rank's. The tensor is divided along
    ``dimension``, where it has this ``length``.
    """
    num_shards, is_first = group.num_shards, group.rank == 0
    shape = mean.tensor.shape
    whole = torch.empty(whole_shape(shape, dimension, length) if is_first else [0], dtype=mean.tensor.dtype)
    rows = whole.view(math.prod(shape[:dimension]), -1) if whole.numel() else whole
    # All shards of a piece together are a chunk.
    piece_numel = max(1, digests.CHUNK_BYTES // (num_shards * mean.tensor.element_size()))
    start = 0
    for chunk in mean.chunks:
        for piece in chunk.split(piece_numel) if len(chunk) else ():
            payload = bytes(piece.cpu().contiguous().view(torch.uint8).numpy())
            payloads = group.world.gather_bytes(payload, f"gathering {mean.name!r}")
            if is_first:
                pieces = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in payloads]
                _place_(rows, torch.stack(pieces).view(piece.dtype), start, math.prod(shape[dimension:]))
            start += len(piece)
    return whole if is_first else None


def _place_(rows: torch.Tensor, pieces: torch.Tensor, start: int, width: int) -> None:
    """Write consecutive elements of each shard, from ``start`` on, where they belong in the whole tensor.

    Parameters
    ----------
    rows : Tensor, [num_rows, num_shards * width or less]
        The whole, flattened before and after the dimension along which it is divided, without room for padding.
    pieces : Tensor, [num_shards, numel]
        Of shards that are flattened [num_rows, width].
    """
    stop = start + pieces.shape[1]
    for row in range(start // width, -(-stop // width)):
        first, last = max(start, row * width), min(stop, (row + 1) * width)
        for place, piece in enumerate(pieces):
            begin = place * width - row * width
            target = rows[row, begin + first : begin + last]
            target.copy_(piece[first - start :][: len(target)])

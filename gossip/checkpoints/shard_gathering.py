"""A whole tensor from the shards of a group's ranks, of which none holds more than a chunk at a time but the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gossip.checkpoints.rank_averages import Mean
from gossip.parameters import digests
from gossip.sharding.local_group import LocalGroup


def whole_shape(shape: Sequence[int], dimension: int, length: int) -> list[int]:
    """Return the shape of a tensor that is divided along ``dimension``, from that of a shard and its length there."""
    return [length if place == dimension else size for place, size in enumerate(shape)]


def gather_shards(mean: Mean, dimension: int, length: int, group: LocalGroup) -> torch.Tensor | None:
    """Return the shards as one, without what pads them, on the group's first rank. Collective over the group.

    Parameters
    ----------
    mean : Mean
        Of this rank's shard, padded to the size of the first rank's; every rank of the group has its own.
    dimension, length : int
        The dimension along which the tensor is divided, and its length there.
    """
    num_shards, is_first = group.num_shards, group.rank == 0
    shape = mean.tensor.shape
    whole = torch.empty(whole_shape(shape, dimension, length) if is_first else [0], dtype=mean.tensor.dtype)
    rows = whole.view(math.prod(shape[:dimension]), -1) if whole.numel() else whole
    # All shards of a piece together are a chunk.
    piece_numel = max(1, digests.CHUNK_BYTES // (num_shards * mean.tensor.element_size()))
    start = 0
    for chunk in mean.chunks:
        for piece in chunk.split(piece_numel):
            gathered = group.gather(piece.cpu(), f"gathering {mean.name!r}") if len(piece) else None
            if gathered is not None:
                _place_(rows, gathered, start, math.prod(shape[dimension:]))
            start += len(piece)
    return whole if is_first else None


def _place_(rows: torch.Tensor, pieces: torch.Tensor, start: int, width: int) -> None:
    """Write where they belong the pieces of all shards that begin at their element ``start``.

    Parameters
    ----------
    rows : Tensor, [num_rows, num_shards * width or less]
        The whole tensor, flattened before and after the dimension along which it is divided. Written in place.
    pieces : Tensor, [num_shards, numel]
        Of each shard, which is flattened [num_rows, width], consecutive elements. Rows have no room for padding.
    """
    stop = start + pieces.shape[1]
    for row in range(start // width, -(-stop // width)):
        first, last = max(start, row * width), min(stop, (row + 1) * width)
        for place, piece in enumerate(pieces):
            begin = place * width - row * width
            target = rows[row, begin + first : begin + last]
            target.copy_(piece[first - start :][: len(target)])

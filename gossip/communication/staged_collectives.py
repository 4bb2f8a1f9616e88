"""Collectives into scratch memory: nothing is assigned before every rank has it, and nothing is left half summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gossip.communication.world import World
from gossip.compression.conversation import accumulation_dtype

STAGING_BYTES = 64 * 2**20
_GLOO_SEGMENT_BYTES = 2**20
_ALIGNMENT_BYTES = 16


class StagedCollectives:
    """Results of collectives before they are assigned to tensors that others read.

    A peer that dies leaves a corrupt buffer, and an operation that was abandoned may write its buffer later. Therefore
    a collective works on a copy, and the copies are assigned once all ranks have confirmed that they have them. The
    copies take at most 64 MiB (a tensor that is not contiguous is copied as a whole): values that fit into this are
    assigned together or, after an error, not at all; of more values, every single one is either the result or its
    previous value. ``num_assigned`` counts the values that have been assigned.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._results: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self._num_bytes = 0
        self.num_assigned = 0

    def average(self, tensor: torch.Tensor, what: str, weight: float = 1.0) -> None:
        """Average ``tensor`` over ranks, this rank's values counting ``weight``. Collective.

        Weights sum to the number of ranks. Half precision is summed in float32.
        """
        dtype = accumulation_dtype(tensor.dtype)
        for scratch in self._copies(tensor, dtype, is_summed=True):
            if weight != 1.0:
                scratch.mul_(weight)
            self._world.average_(scratch, what)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Set ``tensor``, of any dtype, to rank 0's values. Collective."""
        for scratch in self._copies(tensor, tensor.dtype, is_summed=False):
            self._world.broadcast_([scratch], what)

    def assign(self) -> None:
        """Assign what has arrived so far, once all ranks have it. Collective; must be called at the end.

        If not all ranks confirm that they have it, ExchangeError is raised, and none of it is assigned here.
        """
        if self._results:
            self._world.sum_(torch.zeros(1, device=self._world.control_device), "confirming that all ranks have it")
        for targets, scratch in self._results:
            for target, row in zip(targets, scratch, strict=True):
                target.copy_(row[: target.numel()].view(target.shape))
                self.num_assigned += target.numel()
        self._results.clear()
        self._num_bytes = 0

    def _copies(self, tensor: torch.Tensor, dtype: torch.dtype, *, is_summed: bool) -> Iterator[torch.Tensor]:
        """Yield copies of the parts of ``tensor``, one at a time, whose values are assigned to it in the end."""
        if self._world.is_alone or tensor.numel() == 0:
            return
        for targets, length in self._parts(tensor, dtype, is_summed=is_summed):
            num_bytes = len(targets) * length * dtype.itemsize
            if self._num_bytes + num_bytes > STAGING_BYTES:
                self.assign()
            scratch = tensor.new_zeros(len(targets), length, dtype=dtype)
            for row, target in zip(scratch, targets, strict=True):
                row[: target.numel()].view(target.shape).copy_(target)
            yield scratch
            self._results.append((targets, scratch))
            self._num_bytes += num_bytes

    def _parts(self, tensor: torch.Tensor, dtype: torch.dtype, *, is_summed: bool) -> Iterator[_Part]:
        length = STAGING_BYTES // dtype.itemsize
        if tensor.numel() <= length or not tensor.is_contiguous():
            yield [tensor], tensor.numel()
        elif is_summed and tensor.dtype == dtype:
            yield from _in_shares(tensor.view(-1), self._world.world_size)
        else:
            yield from (([part], part.numel()) for part in tensor.view(-1).split(length))


_Part = tuple[Sequence[torch.Tensor], int]
"""Views that receive the rows of one piece of scratch memory, and the minimum length of the rows."""


def _in_shares(flat: torch.Tensor, world_size: int) -> Iterator[_Part]:
    """Yield parts that hold an equal share of each of the segments in which gloo sums a tensor as a whole.

    gloo's ring starts the sum of each segment on another rank. So the values are summed here in the same order as if
    the tensor had been summed at once, and the result has the same bits.
    """
    num_segments = max(-(-flat.nbytes // _GLOO_SEGMENT_BYTES), 2 * world_size)
    per_rank = -(-num_segments // world_size)
    stretch = per_rank * -(-flat.numel() // (per_rank * world_size))

    per_rank = max(STAGING_BYTES // _GLOO_SEGMENT_BYTES // world_size, 2)
    segment_bytes = min(STAGING_BYTES // (per_rank * world_size), _GLOO_SEGMENT_BYTES)
    share = per_rank * (segment_bytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES) // flat.itemsize
    for start in range(0, stretch, share):
        ends = [min((rank + 1) * stretch, rank * stretch + start + share) for rank in range(world_size)]
        yield [flat[rank * stretch + start : end] for rank, end in enumerate(ends)], share

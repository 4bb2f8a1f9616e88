"""Collectives into scratch memory: nothing is assigned before every rank has it, and nothing is ever half summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gossip.communication.world import World, accumulation_dtype

SCRATCH_BYTES = 64 * 2**20
_GLOO_SEGMENT_BYTES = 2**20
_ALIGNMENT_BYTES = 16


class Scratch:
    """Results of collectives on their way into tensors that others read.

    A peer that dies leaves a torn buffer, and an operation that was given up may write its buffer later. So a
    collective works on a copy, and what is in the copies is assigned once all ranks have confirmed that they have it.
    The copies take at most 64 MiB (a tensor that is not contiguous is copied as a whole): what fits into that is
    assigned together or, if there is an error, not at all; of more, every single value is either the result or what it
    was before.

    Parameters
    ----------
    world : World

    Attributes
    ----------
    num_assigned : int
        Number of values that have been assigned.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._results: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self._num_bytes = 0
        self.num_assigned = 0

    def average(self, tensor: torch.Tensor, what: str, weight: float = 1.0) -> None:
        """The mean over ranks for ``tensor``, of which this rank's counts ``weight``. Collective.

        Weights add up to the number of ranks. Half precision is summed in float32.
        """
        dtype = accumulation_dtype(tensor.dtype)
        for scratch in self._copies(tensor, dtype, is_summed=True):
            if weight != 1.0:
                scratch.mul_(weight)
            self._world.average_(scratch, what)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 0's values for ``tensor``, of any dtype. Collective."""
        for scratch in self._copies(tensor, tensor.dtype, is_summed=False):
            self._world.broadcast_([scratch], what)

    def assign(self) -> None:
        """Assign what has come so far, once all ranks have it. Collective; to be called at the end.

        Raises
        ------
        ExchangeError
            Not all ranks have confirmed that they have it: none of it was assigned here.
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
        """Copies of the parts of ``tensor``, whose values are assigned to it in the end; one at a time."""
        if self._world.is_alone or tensor.numel() == 0:
            return
        for targets, length in self._parts(tensor, dtype, is_summed=is_summed):
            num_bytes = len(targets) * length * dtype.itemsize
            if self._num_bytes + num_bytes > SCRATCH_BYTES:
                self.assign()
            scratch = tensor.new_zeros(len(targets), length, dtype=dtype)
            for row, target in zip(scratch, targets, strict=True):
                row[: target.numel()].view(target.shape).copy_(target)
            yield scratch
            self._results.append((targets, scratch))
            self._num_bytes += num_bytes

    def _parts(self, tensor: torch.Tensor, dtype: torch.dtype, *, is_summed: bool) -> Iterator[_Part]:
        length = SCRATCH_BYTES // dtype.itemsize
        if tensor.numel() <= length or not tensor.is_contiguous():
            yield [tensor], tensor.numel()
        elif is_summed and tensor.dtype == dtype:
            yield from _in_shares(tensor.view(-1), self._world.world_size)
        else:
            yield from (([part], part.numel()) for part in tensor.view(-1).split(length))


_Part = tuple[Sequence[torch.Tensor], int]
"""Views that get the rows of one piece of scratch memory, and how long those are at least."""


def _in_shares(flat: torch.Tensor, world_size: int) -> Iterator[_Part]:
    """Parts that hold an equal share of each of the stretches in which gloo adds up a tensor as a whole.

    gloo's ring begins the sum of each stretch on another rank. So a value is added up in the same order here as if the
    tensor had been summed at once, and the result has the same bits.
    """
    num_segments = max(-(-flat.nbytes // _GLOO_SEGMENT_BYTES), 2 * world_size)
    per_rank = -(-num_segments // world_size)
    stretch = per_rank * -(-flat.numel() // (per_rank * world_size))

    per_rank = max(SCRATCH_BYTES // _GLOO_SEGMENT_BYTES // world_size, 2)
    segment_bytes = min(SCRATCH_BYTES // (per_rank * world_size), _GLOO_SEGMENT_BYTES)
    share = per_rank * (segment_bytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES) // flat.itemsize
    for start in range(0, stretch, share):
        ends = [min((rank + 1) * stretch, rank * stretch + start + share) for rank in range(world_size)]
        yield [flat[rank * stretch + start : end] for rank, end in enumerate(ends)], share

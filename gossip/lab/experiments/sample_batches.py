"""What each rank trains on, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Shards:
    """The samples of each rank, in batches of ``batch_size``: as many per epoch on every rank.

    Either an epoch is as long as the smallest shard, and the other ranks leave samples out; or, if ``repeats``, every
    rank goes through its own samples again and again, whatever the others do: then an epoch is as long as the mean
    shard, and shards may be smaller than a batch.

    Parameters
    ----------
    indices : sequence of integer arrays
        The samples of each rank.
    batch_size : int
        Samples per rank and step.
    seed : int
        Of the order of the samples.
    repeats : bool

    Raises
    ------
    ValueError
        A shard is smaller than a batch, and ``repeats`` is not set.
    """

    indices: Sequence[npt.NDArray[np.int64]]
    batch_size: int
    seed: int
    repeats: bool = False

    def __post_init__(self) -> None:
        smallest = min(range(len(self.indices)), key=lambda rank: len(self.indices[rank]))
        if len(self.indices[smallest]) < self.batch_size and not self.repeats:
            raise ValueError(
                f"rank {smallest} has only {len(self.indices[smallest])} samples, less than one batch of "
                f"training.batch_size={self.batch_size}; lower it, use fewer ranks, divide the data more evenly "
                "(data.partition), or give training.steps, with which ranks repeat their samples"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the smallest shard; or of all samples, if ranks repeat them."""
        if self.repeats:
            return max(1, self._num_samples // (len(self.indices) * self.batch_size))
        return min(len(shard) for shard in self.indices) // self.batch_size

    @property
    def left_out_per_epoch(self) -> int:
        """Samples, over all ranks, that an epoch does not reach; each epoch leaves out others."""
        if self.repeats:
            return 0
        return self._num_samples - len(self.indices) * self.steps_per_epoch * self.batch_size

    @property
    def _num_samples(self) -> int:
        return sum(len(shard) for shard in self.indices)

    def batches(
        self, inputs: torch.Tensor, targets: torch.Tensor, *, ranks: range, epoch: int, first: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each step of an epoch the batches of some ranks, one after the other.

        The order of a rank's samples follows from (seed, rank, epoch) alone.

        Parameters
        ----------
        inputs, targets : Tensor, [N, ...]
            All samples.
        ranks : range
        epoch : int
        first : int
            How many steps of the epoch are left out, because they have been made.
        """
        own = [self.indices[rank] for rank in ranks]
        for places in zip(*(self.places(rank, epoch, first) for rank in ranks), strict=True):
            chosen = torch.from_numpy(
                np.concatenate([of_rank[some] for of_rank, some in zip(own, places, strict=True)])
            )
            yield inputs[chosen], targets[chosen]

    def places(self, rank: int, epoch: int, first: int) -> Iterator[npt.NDArray[np.int64]]:
        """Which of a rank's samples are in each batch of an epoch."""
        size = len(self.indices[rank])
        for batch in range(first, self.steps_per_epoch):
            if self.repeats:
                yield self.repeated(rank, epoch * self.steps_per_epoch + batch)
            else:
                yield _order(self.seed, rank, epoch, size)[batch * self.batch_size : (batch + 1) * self.batch_size]

    def repeated(self, rank: int, step: int) -> npt.NDArray[np.int64]:
        """Which of a rank's samples a step takes, if it repeats them: each pass over them is in an order of its own."""
        size = len(self.indices[rank])
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        pieces = []
        for number in range(samples.start // size, (samples.stop - 1) // size + 1):
            order = _order(self.seed, rank, number, size)
            pieces.append(order[max(0, samples.start - number * size) : samples.stop - number * size])
        return np.concatenate(pieces)


@functools.lru_cache(maxsize=4096)  # a pass takes many steps, and the ranks of a process take turns
def _order(seed: int, rank: int, number: int, size: int) -> npt.NDArray[np.int64]:
    order: npt.NDArray[np.int64] = np.random.default_rng((seed, rank, number)).permutation(size)
    return order

"""The samples that each rank trains on, and their order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Shards:
    """The samples of each rank, in batches of ``batch_size``: the same number of batches per epoch on every rank.

    Without ``repeats``, an epoch is as long as the smallest shard, and the other ranks skip samples. With ``repeats``,
    every rank cycles through its own samples independently of the others: an epoch is then as long as the mean shard,
    and shards may be smaller than a batch.

    Raises a ValueError if a shard is smaller than a batch, and ``repeats`` is not set.
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
        """The number of whole batches in the smallest shard or, if ranks repeat their samples, in the mean shard."""
        if self.repeats:
            return max(1, self._num_samples // (len(self.indices) * self.batch_size))
        return min(len(shard) for shard in self.indices) // self.batch_size

    @property
    def left_out_per_epoch(self) -> int:
        """The number of samples, over all ranks, that an epoch skips; they differ from epoch to epoch."""
        if self.repeats:
            return 0
        return self._num_samples - len(self.indices) * self.steps_per_epoch * self.batch_size

    @property
    def _num_samples(self) -> int:
        return sum(len(shard) for shard in self.indices)

    def batches(
        self, inputs: torch.Tensor, targets: torch.Tensor, *, ranks: range, epoch: int, first: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each step of an epoch from step ``first`` on, the batches of some ranks, concatenated.

        ``inputs`` and ``targets``, [N, ...], are all samples. The order of a rank's samples depends on
        (seed, rank, epoch) alone.
        """
        own = [self.indices[rank] for rank in ranks]
        for places in zip(*(self.places(rank, epoch, first) for rank in ranks), strict=True):
            chosen = torch.from_numpy(
                np.concatenate([of_rank[some] for of_rank, some in zip(own, places, strict=True)])
            )
            yield inputs[chosen], targets[chosen]

    def places(self, rank: int, epoch: int, first: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield, for each batch of an epoch, the positions of its samples within the rank's shard."""
        size = len(self.indices[rank])
        for batch in range(first, self.steps_per_epoch):
            if self.repeats:
                yield self.repeated(rank, epoch * self.steps_per_epoch + batch)
            else:
                yield _order(self.seed, rank, epoch, size)[batch * self.batch_size : (batch + 1) * self.batch_size]

    def repeated(self, rank: int, step: int) -> npt.NDArray[np.int64]:
        """Return the positions of a step's samples within the shard of a rank that repeats its samples.

        Each pass over the shard has an order of its own.
        """
        size = len(self.indices[rank])
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        pieces = []
        for number in range(samples.start // size, (samples.stop - 1) // size + 1):
            order = _order(self.seed, rank, number, size)
            pieces.append(order[max(0, samples.start - number * size) : samples.stop - number * size])
        return np.concatenate(pieces)


@functools.lru_cache(maxsize=4096)  # a pass spans many steps, and the ranks of a process alternate
def _order(seed: int, rank: int, number: int, size: int) -> npt.NDArray[np.int64]:
    order: npt.NDArray[np.int64] = np.random.default_rng((seed, rank, number)).permutation(size)
    return order

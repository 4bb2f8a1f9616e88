"""The samples that each rank trains on, and their order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    _orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        smallest = min(range(len(self.indices)), key=lambda rank: len(self.indices[rank]))
        if len(self.indices[smallest]) < self.batch_size and not self.repeats:
            raise ValueError(
                f"rank {smallest} has only {len(self.indices[smallest])} samples, less than one batch of "
                f"training.batch_size={self.batch_size}; lower it, use fewer ranks, divide the data more evenly "
                "(data.partition), or give training.steps, with which ranks repeat their samples"
            )

    @functools.cached_property
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

    def batch(self, ranks: Iterable[int], step: int) -> torch.Tensor:
        """Return the samples of some ranks in a step, one rank's after the other's; the step counts through all epochs.

        Each pass over a shard has an order of its own, which depends on (seed, rank, number of the pass) alone.
        """
        return torch.from_numpy(np.concatenate([self._batch(rank, step) for rank in ranks]))

    def _batch(self, rank: int, step: int) -> npt.NDArray[np.int64]:
        own, size = self.indices[rank], len(self.indices[rank])
        epoch, batch = divmod(step, self.steps_per_epoch)
        # An epoch is one pass, of which the end is skipped, unless the ranks repeat their samples.
        start = step * self.batch_size if self.repeats else epoch * size + batch * self.batch_size
        positions = start + np.arange(self.batch_size)
        samples = np.empty(self.batch_size, dtype=np.int64)
        for number in range(start // size, positions[-1] // size + 1):
            is_in_pass = positions // size == number
            samples[is_in_pass] = own[self._order(rank, number)[positions[is_in_pass] % size]]
        return samples

    def _order(self, rank: int, number: int) -> npt.NDArray[np.int64]:
        """Return the order of a rank's samples in a pass; the latest one of each rank is kept."""
        if rank not in self._orders or self._orders[rank][0] != number:
            order = np.random.default_rng((self.seed, rank, number)).permutation(len(self.indices[rank]))
            self._orders[rank] = number, order
        return self._orders[rank][1]

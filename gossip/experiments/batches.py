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
        self, inputs: torch.Tensor, targets: torch.Tensor, *, rank: int, epoch: int, first: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of one rank in one epoch, in an order that follows from (seed, rank, epoch) alone.

        Parameters
        ----------
        inputs, targets : Tensor, [N, ...]
            This rank's samples, in the order of ``indices[rank]``.
        rank, epoch : int
        first : int
            How many batches of the epoch are left out, because they have been trained on.
        """
        if self.repeats:
            for batch in range(first, self.steps_per_epoch):
                chosen = self._repeated(rank, epoch * self.steps_per_epoch + batch)
                yield inputs[chosen], targets[chosen]
            return
        order = torch.from_numpy(_order(self.seed, rank, epoch, len(inputs)))
        for chosen in order[: self.steps_per_epoch * self.batch_size].split(self.batch_size)[first:]:
            yield inputs[chosen], targets[chosen]

    def _repeated(self, rank: int, step: int) -> torch.Tensor:
        """Which of a rank's samples a step takes: each pass over them is in an order of its own."""
        size = len(self.indices[rank])
        passes, places = np.divmod(np.arange(step * self.batch_size, (step + 1) * self.batch_size), size)
        orders = (_order(self.seed, rank, number, size)[places[passes == number]] for number in np.unique(passes))
        return torch.from_numpy(np.concatenate(list(orders)))


@functools.lru_cache(maxsize=4096)  # a pass takes many steps, and the ranks of a process take turns
def _order(seed: int, rank: int, number: int, size: int) -> npt.NDArray[np.int64]:
    order: npt.NDArray[np.int64] = np.random.default_rng((seed, rank, number)).permutation(size)
    return order

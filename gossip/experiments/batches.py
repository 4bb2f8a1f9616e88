"""What each rank trains on, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Shards:
    """The samples of each rank, in batches of ``batch_size``: as many per epoch on every rank.

    Parameters
    ----------
    indices : sequence of integer arrays
        The samples of each rank.
    batch_size : int
        Samples per rank and step.
    seed : int
        Of the order of the samples.

    Raises
    ------
    ValueError
        A shard is smaller than a batch.
    """

    indices: Sequence[npt.NDArray[np.int64]]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        smallest = min(range(len(self.indices)), key=lambda rank: len(self.indices[rank]))
        if len(self.indices[smallest]) < self.batch_size:
            raise ValueError(
                f"rank {smallest} has only {len(self.indices[smallest])} samples, less than one batch of "
                f"training.batch_size={self.batch_size}; lower it, use fewer ranks, or divide the data more evenly "
                "(data.partition)"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the smallest shard."""
        return min(len(shard) for shard in self.indices) // self.batch_size

    @property
    def left_out_per_epoch(self) -> int:
        """Samples, over all ranks, that an epoch does not reach; each epoch leaves out others."""
        return sum(len(shard) for shard in self.indices) - len(self.indices) * self.steps_per_epoch * self.batch_size

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
        order = torch.from_numpy(np.random.default_rng((self.seed, rank, epoch)).permutation(len(inputs)))
        for chosen in order[: self.steps_per_epoch * self.batch_size].split(self.batch_size)[first:]:
            yield inputs[chosen], targets[chosen]

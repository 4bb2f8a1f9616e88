"""Global batches that are held: each is divided among the ranks that train when it is due."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler


class HeldBatches(Sampler[list[int]]):
    """The shares of one rank in the batches of all ranks together, in a random order that is the same on all.

    ``place()`` returns the number of this rank among those that train, and how many they are, when a batch is due. The
    samples at the end of an epoch that do not fill a batch are left out; they differ from epoch to epoch.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, place: Callable[[], tuple[int, int]]) -> None:
        if num_samples < batch_size:
            raise ValueError(
                f"total_batch_size: a batch has {batch_size} samples, but the dataset {num_samples}; pass less"
            )
        self._num_samples, self._batch_size, self._seed, self._place = num_samples, batch_size, seed, place
        self.epoch = 0

    def __len__(self) -> int:
        return self._num_samples // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        for number in range(len(self)):
            rank, num_ranks = self._place()
            batch = order[number * self._batch_size : (number + 1) * self._batch_size]
            yield batch.tensor_split(num_ranks)[rank].tolist()


class HeldLoader(DataLoader[Any]):
    """A data loader of such batches."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass have the order of an epoch. Local."""
        assert isinstance(self.batch_sampler, HeldBatches)
        self.batch_sampler.epoch = epoch

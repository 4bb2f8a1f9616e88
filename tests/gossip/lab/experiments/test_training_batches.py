"""The order of the samples: equal numbers of steps, nothing lost for good, the same by seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossip.lab.experiments.sample_batches import Shards


def uneven(seed: int = 0) -> Shards:
    return Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=2, seed=seed)


def epoch(shards: Shards, rank: int, number: int) -> list[list[int]]:
    samples, own = torch.arange(12), range(rank, rank + 1)
    return [inputs.tolist() for inputs, _ in shards.batches(samples, samples, ranks=own, epoch=number)]


def test_shards_lose_no_sample_over_the_epochs() -> None:
    shards = uneven()
    assert (shards.steps_per_epoch, shards.left_out_per_epoch) == (2, 4)
    for rank, indices in enumerate(shards.indices):
        seen = [sample for number in range(20) for batch in epoch(shards, rank, number) for sample in batch]
        assert set(seen) == set(indices.tolist())


def test_shards_epoch_goes_on_where_it_was_left() -> None:
    shards = Shards([np.arange(7)], batch_size=2, seed=0)
    for first in range(4):
        batches = shards.batches(torch.arange(7), torch.arange(7), ranks=range(1), epoch=1, first=first)
        assert [inputs.tolist() for inputs, _ in batches] == epoch(shards, 0, 1)[first:]


@pytest.mark.parametrize("repeats", [False, True])
def test_shards_batches_of_several_ranks_stand_one_after_the_other(repeats: bool) -> None:
    shards = Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=2, seed=0, repeats=repeats)
    samples = torch.arange(12)
    found = [inputs.tolist() for inputs, _ in shards.batches(samples, samples, ranks=range(2), epoch=3)]
    assert found == [one + other for one, other in zip(epoch(shards, 0, 3), epoch(shards, 1, 3), strict=True)]


def test_shards_smaller_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has only 5 samples, less than one batch of training\.batch_size=6"):
        Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=6, seed=0)


def batch_of(step: int, shards: Shards, rank: int) -> list[int]:
    number, batch = divmod(step, shards.steps_per_epoch)
    return epoch(shards, rank, number)[batch]


def test_shards_repeat_small_ones_in_orders_of_their_own() -> None:
    shards = Shards([np.arange(0, 7), np.arange(7, 10)], batch_size=2, seed=0, repeats=True)
    assert (shards.steps_per_epoch, shards.left_out_per_epoch) == (2, 0)
    for rank, indices in enumerate(shards.indices):
        samples = [sample for step in range(21) for sample in batch_of(step, shards, rank)]
        passes = [samples[start : start + len(indices)] for start in range(0, len(samples), len(indices))]
        assert all(sorted(each) == indices.tolist() for each in passes)
        assert len({str(each) for each in passes}) > 1

"""The order of the samples: equal numbers of steps, nothing lost for good, the same by seed."""

from __future__ import annotations

import numpy as np
import pytest

from gossip.lab.experiments.sample_batches import Shards


def uneven(seed: int = 0) -> Shards:
    return Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=2, seed=seed)


def epoch(shards: Shards, rank: int, number: int) -> list[list[int]]:
    first = number * shards.steps_per_epoch
    return [shards.batch([rank], step).tolist() for step in range(first, first + shards.steps_per_epoch)]


def test_shards_lose_no_sample_over_the_epochs() -> None:
    shards = uneven()
    assert (shards.steps_per_epoch, shards.left_out_per_epoch) == (2, 4)
    for rank, indices in enumerate(shards.indices):
        seen = [sample for number in range(20) for batch in epoch(shards, rank, number) for sample in batch]
        assert set(seen) == set(indices.tolist())


def test_shards_smaller_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has only 5 samples, less than one batch of training\.batch_size=6"):
        Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=6, seed=0)


def test_shards_repeat_small_ones_in_orders_of_their_own() -> None:
    shards = Shards([np.arange(0, 7), np.arange(7, 10)], batch_size=2, seed=0, repeats=True)
    assert (shards.steps_per_epoch, shards.left_out_per_epoch) == (2, 0)
    for rank, indices in enumerate(shards.indices):
        samples = [sample for step in range(21) for sample in shards.batch([rank], step).tolist()]
        passes = [samples[start : start + len(indices)] for start in range(0, len(samples), len(indices))]
        assert all(sorted(each) == indices.tolist() for each in passes)
        assert len({str(each) for each in passes}) > 1

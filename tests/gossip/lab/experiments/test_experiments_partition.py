"""Partitions: properties of every scheme at many sizes, then what each scheme promises, then refusals."""

from typing import Any

import numpy as np
import pytest
import torch

from gossip.lab.experiments.partition import OPTIONS, partition

SCHEMES = ("iid", *OPTIONS)
LABELS = np.random.default_rng(7).integers(0, 10, 1000)


@pytest.mark.parametrize("world_size", [1, 7, 64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_partition_gives_every_sample_to_one_rank(scheme: str, world_size: int) -> None:
    parts = partition(LABELS, world_size, scheme)
    assert len(parts) == world_size
    assert all(part.dtype == np.int64 and len(part) > 0 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_partition_depends_on_the_seed_alone(scheme: str) -> None:
    def tolist(seed: int, labels: Any = LABELS) -> list[list[int]]:
        return [part.tolist() for part in partition(labels, 5, scheme, seed=seed)]

    np.random.seed(1)  # noqa: NPY002 - the global generator must not matter
    first = tolist(0)
    np.random.seed(2)  # noqa: NPY002
    assert tolist(0) == first
    assert tolist(0, torch.from_numpy(LABELS)) == first
    assert tolist(1) != first


def test_partition_iid_sizes_differ_by_at_most_one_and_all_see_all_classes() -> None:
    parts = partition(LABELS, 7)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [len(np.unique(LABELS[part])) for part in parts] == [10] * 7


def test_partition_by_class_ranks_see_few_classes() -> None:
    labels = np.repeat(np.arange(10), 40)
    one, two = (partition(labels, 10, "by_class", shards_per_rank=shards) for shards in (1, 2))
    assert [len(np.unique(labels[part])) for part in one] == [1] * 10
    assert max(len(np.unique(labels[part])) for part in two) == 2
    assert {len(part) for part in two} == {40}


def test_partition_dirichlet_alpha_orders_the_skew() -> None:
    def skew(alpha: float) -> float:
        """Mean share of a class that the rank with most of it has; 1/8 if equal, 1 if the class lies on one rank."""
        parts = partition(LABELS, 8, "dirichlet", alpha=alpha)
        counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
        return float((counts.max(axis=0) / counts.sum(axis=0)).mean())

    assert skew(0.01) > 0.9
    assert skew(0.01) > skew(0.5) > skew(100.0)
    assert skew(1e6) < 1 / 8 + 0.02


def test_partition_dirichlet_leaves_no_rank_without_samples() -> None:
    labels = np.repeat([0, 1, 2], 10)
    for seed in range(5):
        for world_size in (7, 30):
            parts = partition(labels, world_size, "dirichlet", alpha=1e-3, seed=seed)
            assert min(len(part) for part in parts) >= 1
            assert sorted(np.concatenate(parts).tolist()) == list(range(30))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "iid", "alpha": 0.5}, r"alpha=0\.5 means nothing for scheme 'iid'"),
        ({"scheme": "by_class", "world_size": 501}, r"1000 samples do not fill .* 2 \* 501 = 1002 shards"),
        ({"world_size": 1001}, "1000 samples cannot be dealt to world_size=1001"),
        ({"labels": LABELS.reshape(2, -1)}, r"labels must be one integer per sample, \[N\], got int64 with the shape"),
    ],
)
def test_partition_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(**{"labels": LABELS, "world_size": 4, **arguments})

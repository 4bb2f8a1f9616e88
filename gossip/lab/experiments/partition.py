"""The training samples of each rank: their partition, IID or non-IID like real decentralized data, and their order."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import PositiveFloat, PositiveInt

OPTIONS: Mapping[str, tuple[str, Any]] = {"by_class": ("shards_per_rank", 2), "dirichlet": ("alpha", 0.5)}
"""The option of each scheme that has one, and its default."""


def partition(
    labels: npt.ArrayLike,
    world_size: int,
    scheme: Literal["iid", "by_class", "dirichlet"] = "iid",
    *,
    alpha: PositiveFloat | None = None,
    shards_per_rank: PositiveInt | None = None,
    seed: int = 0,
) -> tuple[npt.NDArray[np.int64], ...]:
    """Assign every sample to exactly one rank.

    Local: the partition depends on the arguments alone, so that every rank computes the same one. Every rank gets at
    least one sample.

    - ``"iid"``: the samples are shuffled and divided evenly; sizes differ by at most one.
    - ``"by_class"``: the samples are sorted by label and cut into ``shards_per_rank * world_size`` shards (sizes differ
      by at most one), which are assigned at random (McMahan et al. 2017, section 3). Most ranks see about
      ``shards_per_rank`` classes.
    - ``"dirichlet"``: rank i gets the share q_c[i] of each class c, with q_c ~ Dir(``alpha``, ..., ``alpha``) drawn
      per class over the ranks (Yurochkin et al. 2019, section 4). With a small ``alpha`` a class is concentrated on few
      ranks; a large ``alpha`` approaches IID. Sizes differ.

    Parameters
    ----------
    labels : array of int, [N]
        The class (or source) of each sample, as a CPU tensor or an array.
    world_size, scheme
        The number of ranks, and the name of the scheme.
    alpha : float, optional
        The concentration of the Dirichlet distribution, positive, 0.5 by default; for ``"dirichlet"`` only.
    shards_per_rank : int, optional
        The number of shards per rank, 2 by default; for ``"by_class"`` only.
    seed : int
        The seed of the random assignment.

    Returns the sample indices of each rank, int64, in ascending order.

    Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017; M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019. T.-M. H. Hsu
    et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019, draw
    the same prior per rank over the classes instead, with equal sizes.

    Examples
    --------
    >>> [part.tolist() for part in partition([0, 0, 1, 1], 2, "by_class", shards_per_rank=1)]
    [[2, 3], [0, 1]]
    """
    label_array = np.asarray(labels)
    if label_array.ndim != 1 or label_array.dtype.kind not in "iu":
        raise ValueError(
            f"labels must be one integer per sample, [N], got {label_array.dtype} with the shape {label_array.shape}; "
            "pass Data.train_labels"
        )
    given = {"alpha": alpha, "shards_per_rank": shards_per_rank}
    for its_scheme, (name, _) in OPTIONS.items():
        if given[name] is not None and scheme != its_scheme:
            raise ValueError(
                f"{name}={given[name]} means nothing for scheme {scheme!r}; leave it out or set scheme={its_scheme!r}"
            )
    if len(label_array) < world_size:
        raise ValueError(
            f"{len(label_array)} samples cannot be dealt to world_size={world_size}: every rank needs at least one; "
            "use more data or fewer ranks"
        )
    generator = np.random.default_rng(seed)
    if scheme == "iid":
        parts = np.array_split(generator.permutation(len(label_array)), world_size)
    elif scheme == "by_class":
        parts = _by_class(label_array, world_size, shards_per_rank or OPTIONS[scheme][1], generator)
    else:
        parts = _dirichlet(label_array, world_size, alpha or OPTIONS[scheme][1], generator)
    return tuple(np.sort(part).astype(np.int64, copy=False) for part in parts)


def _by_class(
    labels: npt.NDArray[np.generic], world_size: int, shards_per_rank: int, generator: np.random.Generator
) -> list[npt.NDArray[np.int64]]:
    num_shards = shards_per_rank * world_size
    if len(labels) < num_shards:
        raise ValueError(
            f"{len(labels)} samples do not fill shards_per_rank * world_size = {shards_per_rank} * {world_size} = "
            f"{num_shards} shards; lower shards_per_rank or use more data or fewer ranks"
        )
    shuffled = generator.permutation(len(labels))
    shards = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], num_shards)
    dealt = generator.permutation(num_shards).reshape(world_size, shards_per_rank)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in dealt]


def _dirichlet(
    labels: npt.NDArray[np.generic], world_size: int, alpha: float, generator: np.random.Generator
) -> list[npt.NDArray[np.int64]]:
    by_class = []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(world_size, alpha))
        ends = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        by_class.append(np.split(members, ends))
    parts = [np.concatenate(pieces) for pieces in zip(*by_class, strict=True)]
    for rank in range(world_size):
        if len(parts[rank]) == 0:  # a rank without data could not train: the largest part gives it a sample
            donor = max(range(world_size), key=lambda other: len(parts[other]))
            parts[rank], parts[donor] = parts[donor][-1:], parts[donor][:-1]
    return parts


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

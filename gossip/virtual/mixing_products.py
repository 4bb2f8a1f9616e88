"""What each replica adds after a round whose messages are values: W m - m without a dense W.

Rounding is applied to differences between messages, not to messages, because what algorithms accumulate over many
rounds must sum to zero over ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from gossip.compression.codec import KnownRounds
from gossip.virtual.shards import Shard
from topologies import Round
from topologies.matrix_storage import IntArray

_GROUPS_FROM = 8
"""From this size of uniform groups on, one mean per group is cheaper than a weighted sum per rank."""
_CHUNK_ROWS = 64
_CHUNK_NUMEL = 2**18


@dataclass(frozen=True)
class Rows:
    """Some rows of a mixing matrix: the ranks that they read, and for each weight the place of its rank among those."""

    sources: IntArray
    places: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor
    surplus: torch.Tensor | None
    """The amount by which the weights of a row exceed 1, [k, 1]; None if that is zero."""


KnownRows = KnownRounds[dict[range, Rows]]
"""By round, the rows of the ranks of each shard."""


def known_rows(shards: Sequence[Shard]) -> KnownRows:
    """Return a memory of the rows of rounds among these shards."""
    return KnownRounds(lambda round_: {shard.ranks: _rows_of(round_, shard.ranks) for shard in shards})


def weighted_differences(
    round_: Round, shards: Sequence[Shard], messages: Sequence[torch.Tensor], wide: torch.dtype, known: KnownRows
) -> list[torch.Tensor]:
    r"""Return for each shard :math:`\sum_j W_{ij} m_j - m_i` of its ranks i, [k, numel], in the dtype ``wide``.

    The messages of each shard's ranks are on its device, [k, numel].
    """
    groups = round_.uniform_groups
    if groups is not None and max(map(len, groups)) >= _GROUPS_FROM:
        return _from_means(groups, shards, messages, wide)
    return _from_sums(round_, shards, messages, wide, known)


def _from_means(
    groups: Sequence[Sequence[int]], shards: Sequence[Shard], messages: Sequence[torch.Tensor], wide: torch.dtype
) -> list[torch.Tensor]:
    """Compute the differences in uniform groups: each rank gets its group's mean, summed in float64."""
    group_of = torch.empty(sum(map(len, groups)), dtype=torch.int64)
    for number, group in enumerate(groups):
        group_of[list(group)] = number
    device = messages[0].device
    means = torch.zeros((len(groups), messages[0].shape[1]), dtype=torch.float64, device=device)
    for shard, message in zip(shards, messages, strict=True):
        own = group_of[shard.ranks.start : shard.ranks.stop].to(device)
        for rows, numbers in zip(message.split(_CHUNK_ROWS), own.split(_CHUNK_ROWS), strict=True):
            means.index_add_(0, numbers, rows.to(device, torch.float64))
    means /= torch.tensor([len(group) for group in groups], dtype=torch.float64, device=device)[:, None]
    differences = []
    for shard, message in zip(shards, messages, strict=True):
        own = group_of[shard.ranks.start : shard.ranks.stop].to(message.device)
        means = means.to(message.device)
        difference = torch.empty_like(message, dtype=wide)
        for part in _columns(message):
            difference[:, part] = means[:, part][own].sub_(message[:, part])
        differences.append(difference)
    return differences


def _from_sums(
    round_: Round, shards: Sequence[Shard], messages: Sequence[torch.Tensor], wide: torch.dtype, known: KnownRows
) -> list[torch.Tensor]:
    """Compute the differences as a weighted sum of rows per rank, all relative to the first rank's values."""
    differences = []
    origin = messages[0][0].to(wide)
    for shard, message in zip(shards, messages, strict=True):
        rows, device = known.of(round_)[shard.ranks], message.device
        places, offsets, weights = rows.places.to(device), rows.offsets.to(device), rows.weights.to(device, wide)
        total = torch.empty_like(message, dtype=wide)
        for part in _columns(message):
            here = origin[part].to(device)
            own = message[:, part] - here
            table = own if len(shards) == 1 else _table(rows.sources, shards, messages, part, here)
            total[:, part] = functional.embedding_bag(  # the weighted sum of rows of a table
                places, table, offsets, mode="sum", per_sample_weights=weights
            ).sub_(own)
            if rows.surplus is not None:
                total[:, part].addcmul_(rows.surplus.to(device, wide), here)
        differences.append(total)
    return differences


def _columns(message: torch.Tensor) -> Iterator[slice]:
    """Yield parts of the values of several ranks, which are small on a CPU so that results stay in its cache."""
    num_ranks, numel = message.shape
    size = max(_CHUNK_NUMEL // num_ranks, 1024) if message.is_cpu else max(numel, 1)
    return (slice(start, start + size) for start in range(0, numel, size))


def _rows_of(round_: Round, ranks: range) -> Rows:
    rows = round_.sparse().tocsr()[ranks.start : ranks.stop]
    if len(ranks) == round_.world_size:
        sources, places = np.arange(len(ranks)), rows.indices
    else:
        sources, places = np.unique(rows.indices, return_inverse=True)
    surplus = np.asarray(rows.sum(1)).reshape(-1, 1) - 1
    return Rows(
        sources,
        torch.from_numpy(places.astype(np.int64)),
        torch.from_numpy(rows.indptr[:-1].astype(np.int64)),
        torch.from_numpy(rows.data.astype(np.float64)),
        torch.from_numpy(surplus) if np.abs(surplus).max(initial=0) > 1e-12 else None,
    )


def _table(
    sources: IntArray, shards: Sequence[Shard], messages: Sequence[torch.Tensor], part: slice, origin: torch.Tensor
) -> torch.Tensor:
    """Return a part of the messages of some ranks, in their order, relative to ``origin``."""
    chosen = []
    for shard, message in zip(shards, messages, strict=True):
        here = sources[(sources >= shard.ranks.start) & (sources < shard.ranks.stop)] - shard.ranks.start
        chosen.append(message[torch.from_numpy(here.astype(np.int64)).to(message.device), part].to(origin))
    return torch.cat(chosen).sub_(origin)

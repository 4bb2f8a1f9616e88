"""How a round keeps its weights: as uniform groups, as sparse rows, or as a formula for one rank's row.

None of the three holds a matrix of n x n numbers. A ``Row`` is ``{j: W[i, j]}`` of one rank i, itself included.
Arrays of ranks and weights as users give them are converted only where nothing is lost.
"""

import functools
import itertools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]
Row = dict[int, float]

#: Weights closer than this to each other count as equal.
WEIGHT_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class UniformGroups:
    """Disjoint groups that cover all ranks; on a group of g ranks all weights are 1/g."""

    world_size: int
    groups: Groups
    is_symmetric: ClassVar = True

    def row(self, rank: int) -> Row:
        group = self._group_of(rank)
        return dict.fromkeys(group, 1.0 / len(group))

    def readers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self._group_of(rank) if other != rank)

    @property
    def uniform_groups(self) -> Groups:
        return self.groups

    @property
    def is_identity(self) -> bool:
        return len(self.groups) == self.world_size

    @property
    def smallest_weight(self) -> float:
        return 1.0 / max(self._sizes.tolist()) if len(self.groups) == 1 else 0.0

    def num_sources(self) -> IntArray:
        return self._sizes[self._index] - 1

    num_targets = num_sources

    def row_sums(self) -> FloatArray:
        return np.ones(self.world_size)  # g entries of 1/g

    column_sums = row_sums

    def matrix(self) -> FloatArray:
        dense = np.zeros((self.world_size, self.world_size))
        for group in self.groups:
            dense[np.ix_(group, group)] = 1.0 / len(group)
        return dense

    def mix(self, values: FloatArray) -> FloatArray:
        order, starts = self._order
        means = np.add.reduceat(values[order], starts) / self._sizes.reshape(-1, *[1] * (values.ndim - 1))
        return means[self._index]

    mix_transposed = mix

    def edges(self) -> tuple[IntArray, IntArray, FloatArray]:
        entries = self.sparse().tocoo()
        others = entries.row != entries.col
        return entries.row[others], entries.col[others], entries.data[others]

    def sparse(self) -> Any:
        from scipy import sparse

        sizes = self._sizes[self._index]
        columns = np.fromiter(
            itertools.chain.from_iterable(map(self._group_of, range(self.world_size))), np.int64, count=sizes.sum()
        )
        starts = np.concatenate(([0], np.cumsum(sizes)))
        return sparse.csr_array((np.repeat(1.0 / sizes, sizes), columns, starts))

    def to_dict(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "groups": [list(group) for group in self.groups if len(group) > 1]}

    def _group_of(self, rank: int) -> tuple[int, ...]:
        return self.groups[self._index[rank]]

    @cached_property
    def _index(self) -> IntArray:
        """The number of every rank's group."""
        index = np.empty(self.world_size, dtype=np.int64)
        index[self._order[0]] = np.repeat(np.arange(len(self.groups)), self._sizes)
        return index

    @cached_property
    def _order(self) -> tuple[IntArray, IntArray]:
        """All ranks, group by group, and where each group starts."""
        ranks = np.fromiter(itertools.chain.from_iterable(self.groups), dtype=np.int64, count=self.world_size)
        return ranks, np.concatenate(([0], np.cumsum(self._sizes)[:-1]))

    @cached_property
    def _sizes(self) -> IntArray:
        return np.fromiter(map(len, self.groups), dtype=np.int64, count=len(self.groups))


@dataclass(frozen=True, eq=False)
class SparseRows:
    """The matrix by compressed rows, without its diagonal: row i is the slice ``starts[i]:starts[i + 1]``."""

    starts: IntArray
    sources: IntArray
    weights: FloatArray
    self_weights: FloatArray

    def __post_init__(self) -> None:
        for array in (self.starts, self.sources, self.weights, self.self_weights):
            array.setflags(write=False)

    @property
    def world_size(self) -> int:
        return len(self.self_weights)

    @cached_property
    def targets(self) -> IntArray:
        """The row of every stored entry."""
        targets = np.repeat(np.arange(self.world_size), np.diff(self.starts))
        targets.setflags(write=False)
        return targets

    def row(self, rank: int) -> Row:
        others = slice(self.starts[rank], self.starts[rank + 1])
        row = dict(zip(self.sources[others].tolist(), self.weights[others].tolist(), strict=True))
        row[rank] = float(self.self_weights[rank])
        return row

    def readers(self, rank: int) -> tuple[int, ...]:
        starts, readers = self._columns
        return tuple(readers[starts[rank] : starts[rank + 1]].tolist())

    @cached_property
    def groups(self) -> Groups:
        order = np.argsort(self._labels, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(self._labels[order])) + 1)
        return tuple(tuple(part.tolist()) for part in parts)

    @cached_property
    def uniform_groups(self) -> Groups | None:
        size = np.bincount(self._labels)[self._labels]
        all_pairs = np.array_equal(np.diff(self.starts), size - 1)
        weights = np.concatenate((self.self_weights, self.weights))
        expected = 1.0 / np.concatenate((size, size[self.targets]))
        uniform = all_pairs and bool(np.all(np.abs(weights - expected) <= WEIGHT_TOLERANCE))
        return self.groups if uniform else None

    @property
    def is_identity(self) -> bool:
        return not len(self.sources) and bool(np.all(self.self_weights == 1.0))

    @property
    def is_symmetric(self) -> bool:
        backward = np.lexsort((self.targets, self.sources))
        return (
            np.array_equal(self.targets, self.sources[backward])
            and np.array_equal(self.sources, self.targets[backward])
            and bool(np.all(np.abs(self.weights - self.weights[backward]) <= WEIGHT_TOLERANCE))
        )

    @property
    def smallest_weight(self) -> float:
        stored = min(self.self_weights.min(), self.weights.min(initial=np.inf))
        everywhere = len(self.sources) == self.world_size * (self.world_size - 1)
        return float(stored if everywhere else min(stored, 0.0))

    def num_sources(self) -> IntArray:
        return np.diff(self.starts)

    def num_targets(self) -> IntArray:
        return np.bincount(self.sources, minlength=self.world_size)

    def row_sums(self) -> FloatArray:
        return np.bincount(self.targets, weights=self.weights, minlength=self.world_size) + self.self_weights

    def column_sums(self) -> FloatArray:
        return np.bincount(self.sources, weights=self.weights, minlength=self.world_size) + self.self_weights

    def matrix(self) -> FloatArray:
        dense = np.diag(self.self_weights)
        dense[self.targets, self.sources] = self.weights
        return dense

    def mix(self, values: FloatArray) -> FloatArray:
        return self._times(self._sparse, values)

    def mix_transposed(self, values: FloatArray) -> FloatArray:
        return self._times(self._sparse.T, values)

    def _times(self, matrix: Any, values: FloatArray) -> FloatArray:
        return np.asarray(matrix @ values.reshape(self.world_size, -1)).reshape(values.shape)

    def to_dict(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "targets": self.targets.tolist(),
            "sources": self.sources.tolist(),
            "weights": self.weights.tolist(),
            "self_weights": self.self_weights.tolist(),
        }

    def edges(self) -> tuple[IntArray, IntArray, FloatArray]:
        return self.targets, self.sources, self.weights

    def sparse(self) -> Any:
        return self._sparse.copy()

    @cached_property
    def _sparse(self) -> Any:
        from scipy import sparse  # 0.1 s that only an analysis needs

        shape = (self.world_size, self.world_size)
        others = sparse.csr_array((self.weights, self.sources, self.starts), shape=shape)
        return (others + sparse.diags_array(self.self_weights)).tocsr()

    @cached_property
    def _labels(self) -> IntArray:
        """The smallest rank of every rank's component.

        Every edge hooks the larger of its two roots below the smaller, then all paths are shortened to their root;
        a few sweeps suffice, also on long rings.
        """
        labels = np.arange(self.world_size)
        while True:
            one, other = labels[self.targets], labels[self.sources]
            if np.array_equal(one, other):
                return labels
            np.minimum.at(labels, np.maximum(one, other), np.minimum(one, other))
            while not np.array_equal(shorter := labels[labels], labels):
                labels = shorter

    @cached_property
    def _columns(self) -> tuple[IntArray, IntArray]:
        """The readers of rank j are ``readers[starts[j]:starts[j + 1]]``."""
        readers = self.targets[np.argsort(self.sources, kind="stable")]
        return np.concatenate(([0], np.cumsum(self.num_targets()))), readers


Explicit = UniformGroups | SparseRows


@dataclass(frozen=True, eq=False)
class Formula:
    """Rows and readers by a formula for one rank; everything else by writing all of them down when it is needed.

    The newest rank's are kept: a process that trains asks for its own, again for every bucket.
    """

    world_size: int
    formula: Callable[[int], Mapping[int, float]]
    #: ``None``: W is symmetric, a rank is read by those it reads.
    read_by: Callable[[int], tuple[int, ...]] | None
    write_down: Callable[[], Explicit]

    def row(self, rank: int) -> Row:
        return self._row(rank).copy()

    @cached_property
    def _row(self) -> Callable[[int], Row]:
        return functools.lru_cache(maxsize=1)(lambda rank: complete_row(rank, self.formula(rank)))

    @cached_property
    def readers(self) -> Callable[[int], tuple[int, ...]]:
        if self.read_by is not None:
            return functools.lru_cache(maxsize=1)(self.read_by)
        return lambda rank: tuple(sorted(other for other in self._row(rank) if other != rank))

    @cached_property
    def explicit(self) -> Explicit:
        return self.write_down()


Storage = Explicit | Formula


def complete_row(rank: int, row: Mapping[int, float]) -> Row:
    """Return the row with the weight that a rank keeps: by default what the others leave."""
    return dict(row) if rank in row else {**row, rank: 1.0 - sum(row.values())}


def rank_array(argument: str, values: npt.ArrayLike, world_size: int) -> IntArray:
    """Return ranks as an array of integers from 0 to ``world_size - 1``."""
    array = _as_array(argument, values, "iu", "integers")
    outside = array[(array < 0) | (array >= world_size)]
    if len(outside):
        raise ValueError(
            f"{argument} names rank {int(outside[0])}, ranks go from 0 to {world_size - 1}; remove the edge or raise "
            f"world_size"
        )
    return array.astype(np.int64, copy=False)


def weight_array(argument: str, values: npt.ArrayLike) -> FloatArray:
    """Return weights as an array of float64."""
    return _as_array(argument, values, "iuf", "real numbers").astype(np.float64, copy=False)


def _as_array(argument: str, values: Any, kinds: str, what: str) -> npt.NDArray[Any]:
    if isinstance(values, nx.Graph):
        raise TypeError(f"{argument} is a networkx graph; pass its edges, or use Topology.from_graph")
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in kinds and (array.size or array.dtype != np.float64):  # an empty list is of floats
        raise TypeError(
            f"{argument} must be {what}, in an array or in lists of the same length, got {reprlib.repr(values)}; "
            f"correct it"
        )
    return array

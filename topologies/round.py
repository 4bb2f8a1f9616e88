"""One round: a weighted graph that says who mixes what with whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.validation import check_integer, check_world_size

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]

#: Weights closer than this to 1/g count as 1/g when uniform groups are recognised.
_WEIGHT_TOLERANCE = 1e-12


class _Rows(NamedTuple):
    """The matrix by compressed rows, without its diagonal: row i is the slice ``starts[i]:starts[i + 1]``."""

    starts: IntArray
    sources: IntArray
    weights: FloatArray
    self_weights: FloatArray

    @property
    def targets(self) -> IntArray:
        """The row of every stored entry."""
        return np.repeat(np.arange(len(self.self_weights)), np.diff(self.starts))


@dataclass(frozen=True, eq=False, repr=False)
class Round:
    """One exchange between ``world_size`` ranks: ``x_i <- sum_j W[i, j] x_j``.

    ``W[i, j]`` is the weight that rank i gives to what it gets from rank j; data flows along the edge j -> i.
    A round is immutable and knows no transport. It is built by :meth:`from_groups`, :meth:`from_edges`,
    :meth:`from_rows`, :meth:`from_matrix` or :meth:`identity`, and stores either disjoint uniform groups or
    sparse rows: no n x n matrix exists unless :meth:`matrix` is called.

    Examples
    --------
    >>> round_ = Round.from_groups(4, [(0, 1)])
    >>> round_.neighbours(0), round_.self_weight(0), round_.groups
    ({1: 0.5}, 0.5, ((0, 1), (2,), (3,)))
    """

    world_size: int
    _uniform: Groups | None
    _rows: _Rows | None

    @classmethod
    def identity(cls, world_size: int) -> Round:
        """Return the round in which nothing is sent: ``W = I``."""
        return cls.from_groups(world_size, ())

    @classmethod
    def from_groups(cls, world_size: int, groups: Iterable[Iterable[int]]) -> Round:
        """Return the round in which every group replaces its members by their mean.

        Parameters
        ----------
        world_size
            Number of ranks n.
        groups
            Disjoint sets of ranks; on a group of g ranks all weights are 1/g. A rank in no group is alone.

        Raises
        ------
        ValueError
            If a rank is outside ``0 .. world_size - 1`` or named twice.
        """
        world_size = check_world_size(world_size)
        alone = np.ones(world_size, dtype=bool)
        partition = []
        for group in groups:
            members = tuple(sorted(check_integer("a rank in groups", rank, minimum=0) for rank in group))
            for rank in members:
                if rank >= world_size:
                    raise ValueError(
                        f"groups names rank {rank}, ranks go from 0 to {world_size - 1}; remove it or raise world_size"
                    )
                if not alone[rank]:
                    raise ValueError(f"groups names rank {rank} twice, groups are disjoint; name it once")
                alone[rank] = False
            if members:
                partition.append(members)
        partition.extend((int(rank),) for rank in np.flatnonzero(alone))
        return cls(world_size, tuple(sorted(partition)), None)

    @classmethod
    def from_edges(
        cls,
        world_size: int,
        targets: npt.ArrayLike,
        sources: npt.ArrayLike,
        weights: npt.ArrayLike,
        self_weights: npt.ArrayLike | None = None,
    ) -> Round:
        """Return the round with ``W[targets[e], sources[e]] = weights[e]``.

        Parameters
        ----------
        world_size
            Number of ranks n.
        targets, sources
            Integers, shape ``[edges]``: rank ``targets[e]`` reads what rank ``sources[e]`` sends. No pair occurs
            twice, and none is a loop.
        weights
            Shape ``[edges]`` or a scalar. A weight of 0 is no edge.
        self_weights
            Shape ``[n]`` or a scalar: the diagonal of W. By default what makes every row sum to 1.

        Raises
        ------
        ValueError
            If a rank is out of range, a pair is repeated or a loop, or a weight is not finite.
        """
        world_size = check_world_size(world_size)
        target = np.asarray(targets, dtype=np.int64).reshape(-1)
        source = np.asarray(sources, dtype=np.int64).reshape(-1)
        if target.shape != source.shape:
            raise ValueError(
                f"targets has {len(target)} entries and sources has {len(source)}; pass one of each per edge"
            )
        weight = np.broadcast_to(np.asarray(weights, dtype=np.float64), target.shape)
        _check_edges(world_size, target, source, weight)
        kept = np.flatnonzero(weight)
        kept = kept[np.lexsort((source[kept], target[kept]))]
        target, source, weight = target[kept], source[kept], weight[kept]
        repeated = np.flatnonzero((np.diff(target) == 0) & (np.diff(source) == 0))
        if len(repeated):
            edge = repeated[0]
            raise ValueError(
                f"the edge {source[edge]} -> {target[edge]} is given twice; merge the two and add their weights"
            )
        if self_weights is None:
            diagonal = np.ones(world_size) - np.bincount(target, weights=weight, minlength=world_size)
        else:
            diagonal = np.broadcast_to(np.asarray(self_weights, dtype=np.float64), (world_size,)).copy()
            if not np.isfinite(diagonal).all():
                rank = int(np.flatnonzero(~np.isfinite(diagonal))[0])
                raise ValueError(f"W[{rank}, {rank}] is {float(diagonal[rank])}; every weight must be finite")
        starts = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=world_size))))
        rows = _Rows(starts, source, weight, diagonal)
        for array in rows:
            array.setflags(write=False)
        return cls(world_size, None, rows)

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float]]) -> Round:
        """Return the round whose row i is ``rows[i] = {j: W[i, j]}``.

        A row that does not name its own rank keeps what the others leave: ``W[i, i] = 1 - sum_j W[i, j]``.

        Examples
        --------
        >>> Round.from_rows([{1: 0.25}, {0: 0.5, 1: 0.5}]).self_weight(0)
        0.75
        """
        edges = [(i, j, weight) for i, row in enumerate(rows) for j, weight in row.items() if j != i]
        own = [row.get(i, 1.0 - sum(row.values())) for i, row in enumerate(rows)]
        targets, sources, weights = zip(*edges, strict=True) if edges else ((), (), ())
        return cls.from_edges(len(rows), targets, sources, weights, own)

    @classmethod
    def from_matrix(cls, matrix: npt.ArrayLike) -> Round:
        """Return the round with the mixing matrix W of shape ``[n, n]``.

        Raises
        ------
        ValueError
            If the matrix is not square or an entry is not finite.
        """
        dense = np.asarray(matrix, dtype=np.float64)
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or not len(dense):
            raise ValueError(
                f"matrix must be square, of shape [world_size, world_size], got shape {list(dense.shape)}; "
                f"row i holds the weights that rank i gives to what it gets"
            )
        off_diagonal = dense.copy()
        np.fill_diagonal(off_diagonal, 0.0)
        targets, sources = np.nonzero(off_diagonal)
        return cls.from_edges(len(dense), targets, sources, dense[targets, sources], np.diagonal(dense))

    def matrix(self) -> FloatArray:
        """Return W as a new float64 array of shape ``[n, n]``."""
        dense = np.zeros((self.world_size, self.world_size))
        if self._rows is not None:
            dense[self._rows.targets, self._rows.sources] = self._rows.weights
            np.fill_diagonal(dense, self._rows.self_weights)
        for group in self._uniform or ():
            dense[np.ix_(group, group)] = 1.0 / len(group)
        return dense

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The round as a frozen ``networkx.DiGraph``: edge j -> i has ``weight`` W[i, j], self-loops included."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.world_size))
        for rank in range(self.world_size):
            row = {rank: self.self_weight(rank), **self.neighbours(rank)}
            graph.add_weighted_edges_from((source, rank, weight) for source, weight in row.items() if weight)
        return nx.freeze(graph)

    def neighbours(self, rank: int) -> dict[int, float]:
        """Return ``{j: W[rank, j]}`` for the others that ``rank`` reads, by rising j."""
        rank = self._check_rank(rank)
        if self._rows is None:
            group = self._group_of(rank)
            return {other: 1.0 / len(group) for other in group if other != rank}
        row = slice(self._rows.starts[rank], self._rows.starts[rank + 1])
        return dict(zip(self._rows.sources[row].tolist(), self._rows.weights[row].tolist(), strict=True))

    def targets(self, rank: int) -> tuple[int, ...]:
        """Return the others that read ``rank``, in rising order."""
        rank = self._check_rank(rank)
        if self._rows is None:
            return tuple(other for other in self._group_of(rank) if other != rank)
        starts, readers = self._columns
        return tuple(readers[starts[rank] : starts[rank + 1]].tolist())

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the others that ``rank`` reads or is read by, in rising order."""
        return tuple(sorted({*self.neighbours(rank), *self.targets(rank)}))

    def self_weight(self, rank: int) -> float:
        """Return ``W[rank, rank]``."""
        rank = self._check_rank(rank)
        if self._rows is None:
            return 1.0 / len(self._group_of(rank))
        return float(self._rows.self_weights[rank])

    @cached_property
    def groups(self) -> Groups:
        """The connected components, each sorted, by their smallest rank; a rank that is alone is one too."""
        if self._rows is None:
            assert self._uniform is not None
            return self._uniform
        labels = _component_labels(self.world_size, self._rows.targets, self._rows.sources)
        order = np.argsort(labels, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
        return tuple(tuple(part.tolist()) for part in parts)

    @cached_property
    def uniform_groups(self) -> Groups | None:
        """The groups, if W is 1/g between all pairs of every group of g ranks; else ``None``.

        Such a round can run as one small all-reduce per group.
        """
        if self._rows is None:
            return self._uniform
        size = np.empty(self.world_size, dtype=np.int64)
        for group in self.groups:
            size[list(group)] = len(group)
        all_pairs = np.array_equal(np.diff(self._rows.starts), size - 1)
        weights = np.concatenate((self._rows.self_weights, self._rows.weights))
        expected = 1.0 / np.concatenate((size, size[self._rows.targets]))
        if all_pairs and bool(np.all(np.abs(weights - expected) <= _WEIGHT_TOLERANCE)):
            return self.groups
        return None

    @property
    def is_identity(self) -> bool:
        """Whether nothing is sent and every rank keeps what it has."""
        if self._rows is None:
            return len(self.groups) == self.world_size
        return not len(self._rows.sources) and bool(np.all(self._rows.self_weights == 1.0))

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether ``W[i, j] == W[j, i]`` for all pairs, to the last few bits."""
        if self._rows is None:
            return True
        rows = self._rows
        forward = np.lexsort((rows.sources, rows.targets))
        backward = np.lexsort((rows.targets, rows.sources))
        return (
            np.array_equal(rows.targets[forward], rows.sources[backward])
            and np.array_equal(rows.sources[forward], rows.targets[backward])
            and bool(np.all(np.abs(rows.weights[forward] - rows.weights[backward]) <= _WEIGHT_TOLERANCE))
        )

    def num_sources(self) -> IntArray:
        """Return how many others each rank reads, shape ``[n]``."""
        return self._group_sizes() - 1 if self._rows is None else np.diff(self._rows.starts)

    def num_targets(self) -> IntArray:
        """Return by how many others each rank is read, shape ``[n]``."""
        return self._group_sizes() - 1 if self._rows is None else np.diff(self._columns[0])

    def row_sums(self) -> FloatArray:
        """Return ``sum_j W[i, j]`` for every i, shape ``[n]``."""
        if self._rows is None:
            return np.ones(self.world_size)  # g entries of 1/g
        sums = np.bincount(self._rows.targets, weights=self._rows.weights, minlength=self.world_size)
        return sums + self._rows.self_weights

    def column_sums(self) -> FloatArray:
        """Return ``sum_i W[i, j]`` for every j, shape ``[n]``."""
        if self._rows is None:
            return np.ones(self.world_size)
        sums = np.bincount(self._rows.sources, weights=self._rows.weights, minlength=self.world_size)
        return sums + self._rows.self_weights

    def to_dict(self) -> dict[str, Any]:
        """Return the round as plain JSON types; :meth:`from_dict` reads them back exactly."""
        if self._rows is None:
            return {"world_size": self.world_size, "groups": [list(g) for g in self.groups if len(g) > 1]}
        return {
            "world_size": self.world_size,
            "targets": self._rows.targets.tolist(),
            "sources": self._rows.sources.tolist(),
            "weights": self._rows.weights.tolist(),
            "self_weights": self._rows.self_weights.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Round:
        """Return the round that :meth:`to_dict` wrote."""
        keys = set(data)
        if keys == {"world_size", "groups"}:
            return cls.from_groups(**data)
        if keys == {"world_size", "targets", "sources", "weights", "self_weights"}:
            return cls.from_edges(**data)
        raise ValueError(
            f"a round needs the keys world_size and groups, or world_size, targets, sources, weights and "
            f"self_weights, got {sorted(keys)}; write it with Round.to_dict()"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Round):
            return NotImplemented
        if self.world_size != other.world_size or self.groups != other.groups:
            return False
        if self._rows is None and other._rows is None:
            return True
        return all(
            self.self_weight(rank) == other.self_weight(rank) and self.neighbours(rank) == other.neighbours(rank)
            for rank in range(self.world_size)
        )

    def __hash__(self) -> int:
        return hash((self.world_size, self.groups))

    def __repr__(self) -> str:
        if self.is_identity:
            return f"<Round: identity on {self.world_size} ranks>"
        if self.uniform_groups is not None:
            sizes = sorted({len(group) for group in self.groups})
            return f"<Round: {len(self.groups)} uniform groups of {sizes} on {self.world_size} ranks>"
        return f"<Round: {int(self.num_sources().sum())} edges on {self.world_size} ranks>"

    def _check_rank(self, rank: int) -> int:
        rank = check_integer("rank", rank, minimum=0)
        if rank >= self.world_size:
            raise ValueError(f"rank must be between 0 and {self.world_size - 1}, got {rank}; pass one of these")
        return rank

    @cached_property
    def _group_index(self) -> IntArray:
        index = np.empty(self.world_size, dtype=np.int64)
        for number, group in enumerate(self.groups):
            index[list(group)] = number
        return index

    def _group_of(self, rank: int) -> tuple[int, ...]:
        return self.groups[self._group_index[rank]]

    def _group_sizes(self) -> IntArray:
        return np.array([len(group) for group in self.groups], dtype=np.int64)[self._group_index]

    @cached_property
    def _columns(self) -> tuple[IntArray, IntArray]:
        """The readers of rank j are ``readers[starts[j]:starts[j + 1]]``."""
        assert self._rows is not None
        readers = self._rows.targets[np.argsort(self._rows.sources, kind="stable")]
        counts = np.bincount(self._rows.sources, minlength=self.world_size)
        return np.concatenate(([0], np.cumsum(counts))), readers


def _check_edges(world_size: int, targets: IntArray, sources: IntArray, weights: FloatArray) -> None:
    for name, ranks in (("targets", targets), ("sources", sources)):
        outside = np.flatnonzero((ranks < 0) | (ranks >= world_size))
        if len(outside):
            raise ValueError(
                f"{name} names rank {ranks[outside[0]]}, ranks go from 0 to {world_size - 1}; remove the edge or "
                f"raise world_size"
            )
    loops = np.flatnonzero(targets == sources)
    if len(loops):
        rank = targets[loops[0]]
        raise ValueError(f"the edge {rank} -> {rank} is a loop; give what a rank keeps as its self weight")
    wrong = np.flatnonzero(~np.isfinite(weights))
    if len(wrong):
        edge = wrong[0]
        raise ValueError(f"W[{targets[edge]}, {sources[edge]}] is {float(weights[edge])}; every weight must be finite")


def _component_labels(world_size: int, targets: IntArray, sources: IntArray) -> IntArray:
    """Return for every rank the smallest rank of its component.

    Every edge hooks the larger of its two roots below the smaller, then all paths are shortened to their root;
    a few sweeps suffice, also on long rings.
    """
    labels = np.arange(world_size)
    while True:
        one, other = labels[targets], labels[sources]
        if np.array_equal(one, other):
            return labels
        np.minimum.at(labels, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(shorter := labels[labels], labels):
            labels = shorter

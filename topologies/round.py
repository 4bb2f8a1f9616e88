"""One round: a weighted graph that says who mixes what with whom."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.matrix_storage import (
    Explicit,
    FloatArray,
    Formula,
    Groups,
    IntArray,
    SparseRows,
    Storage,
    UniformGroups,
    complete_row,
    rank_array,
    weight_array,
)
from topologies.validation import check_integer, check_real, check_world_size


@dataclass(frozen=True, eq=False, repr=False)
class Round:
    """One exchange between ``world_size`` ranks: ``x_i <- sum_j W[i, j] x_j``.

    ``W[i, j]`` is the weight that rank i gives to what it gets from rank j; data flows along the edge j -> i.
    A round is immutable and knows no transport. It is built by :meth:`from_groups`, :meth:`from_edges`,
    :meth:`from_rows`, :meth:`from_matrix`, :meth:`from_formula` or :meth:`identity`. It stores disjoint uniform
    groups, sparse rows or a formula: no n x n matrix exists unless :meth:`matrix` is called.

    Examples
    --------
    >>> round_ = Round.from_groups(4, [(0, 1)])
    >>> round_.neighbours(0), round_.self_weight(0), round_.groups
    ({1: 0.5}, 0.5, ((0, 1), (2,), (3,)))
    """

    world_size: int
    _storage: Storage

    @classmethod
    def identity(cls, world_size: int) -> Round:
        """Return the round in which nothing is sent: ``W = I``."""
        return cls.from_groups(world_size, ())

    @classmethod
    def from_groups(cls, world_size: int, groups: Iterable[Iterable[int]]) -> Round:
        """Return the round in which every group replaces its members by their mean.

        Groups are disjoint sets of ranks; on a group of g ranks all weights are 1/g. A rank in no group is alone.
        """
        world_size = check_world_size(world_size)
        alone = np.ones(world_size, dtype=bool)
        partition = []
        for group in _iterable("groups", groups, "a list of groups of ranks"):
            members = tuple(
                sorted(
                    check_integer("a rank in groups", rank, minimum=0, maximum=world_size - 1)
                    for rank in _iterable("a group in groups", group, "a list of ranks")
                )
            )
            for rank in members:
                if not alone[rank]:
                    raise ValueError(f"groups names rank {rank} twice, groups are disjoint; name it once")
                alone[rank] = False
            if members:
                partition.append(members)
        partition.extend((int(rank),) for rank in np.flatnonzero(alone))
        return cls(world_size, UniformGroups(world_size, tuple(sorted(partition))))

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
        targets, sources
            Integers, shape ``[edges]``: rank ``targets[e]`` reads what rank ``sources[e]`` sends. No pair occurs
            twice, and none is a loop.
        weights
            Shape ``[edges]`` or a scalar. A weight of 0 is no edge.
        self_weights
            Shape ``[n]`` or a scalar: the diagonal of W. By default what makes every row sum to 1.
        """
        world_size = check_world_size(world_size)
        target = np.atleast_1d(rank_array("targets", targets, world_size))
        source = np.atleast_1d(rank_array("sources", sources, world_size))
        if target.shape != source.shape or target.ndim != 1:
            raise ValueError(
                f"targets has {target.size} entries and sources has {source.size}, of shape {list(target.shape)} and "
                f"{list(source.shape)}; pass one of each per edge, of shape [edges]"
            )
        weight = _one_each("weights", weights, len(target), "edge")
        _refuse_first(target == source, target, source, "is a loop; give what a rank keeps as its self weight")
        _refuse_first(~np.isfinite(weight), target, source, "has a weight that is not finite; correct it")
        kept = np.flatnonzero(weight)
        kept = kept[np.lexsort((source[kept], target[kept]))]
        target, source, weight = target[kept], source[kept], weight[kept]
        repeated = (np.diff(target) == 0) & (np.diff(source) == 0)
        _refuse_first(repeated, target, source, "is given twice; merge the two and add their weights")
        if self_weights is None:
            diagonal = np.ones(world_size) - np.bincount(target, weights=weight, minlength=world_size)
        else:
            diagonal = _one_each("self_weights", self_weights, world_size, "rank").copy()
            ranks = np.arange(world_size)
            _refuse_first(~np.isfinite(diagonal), ranks, ranks, "has a self weight that is not finite; correct it")
        starts = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=world_size))))
        return cls(world_size, SparseRows(starts, source, weight, diagonal))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float]]) -> Round:
        """Return the round whose row i is ``rows[i] = {j: W[i, j]}``.

        A row that does not name its own rank keeps what the others leave: ``W[i, i] = 1 - sum_j W[i, j]``.

        Examples
        --------
        >>> Round.from_rows([{1: 0.25}, {0: 0.5, 1: 0.5}]).self_weight(0)
        0.75
        """
        what = "a list of mappings {j: W[i, j]}"
        rows = [complete_row(i, _checked_row(i, row)) for i, row in enumerate(_iterable("rows", rows, what))]
        edges = [(i, j, weight) for i, row in enumerate(rows) for j, weight in row.items() if j != i]
        own = [row[i] for i, row in enumerate(rows)]
        targets, sources, weights = zip(*edges, strict=True) if edges else ((), (), ())
        return cls.from_edges(len(rows), targets, sources, weights, own)

    @classmethod
    def from_matrix(cls, matrix: npt.ArrayLike) -> Round:
        """Return the round with the mixing matrix W of shape ``[n, n]``, of finite entries."""
        dense = weight_array("matrix", matrix)
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or not len(dense):
            raise ValueError(
                f"matrix must be square, of shape [world_size, world_size], got shape {list(dense.shape)}; "
                f"row i holds the weights that rank i gives to what it gets"
            )
        off_diagonal = dense.copy()
        np.fill_diagonal(off_diagonal, 0.0)
        targets, sources = np.nonzero(off_diagonal)
        return cls.from_edges(len(dense), targets, sources, dense[targets, sources], np.diagonal(dense))

    @classmethod
    def from_formula(
        cls,
        world_size: int,
        row: Callable[[int], Mapping[int, float]],
        *,
        readers: Callable[[int], tuple[int, ...]] | None = None,
        whole: Callable[[], Round] | None = None,
    ) -> Round:
        """Return a round that is known by a formula for one rank: a rank's row costs the same for any world size.

        It is for closed forms, which are right by construction. The formula is trusted: neither here nor in a
        topology are ranks, weights or sums checked, for that would take every row. What is not proven belongs into
        :meth:`from_rows` or :meth:`from_edges`, whose rounds a topology checks when it first uses them.

        Parameters
        ----------
        row
            ``row(i) -> {j: W[i, j]}`` by rising j; what does not name i itself keeps what the others leave, as in
            :meth:`from_rows`.
        readers
            ``readers(j)`` -> the ranks other than j that read j, in rising order. By default W is symmetric, and
            these are the ranks that j reads.
        whole
            Returns the same round built by another constructor, faster than asking for every row; it is called
            when something is asked about the round as a whole.

        Examples
        --------
        >>> Round.from_formula(10**9, lambda i: {i ^ 1: 0.5}).neighbours(123_456_789)
        {123456788: 0.5}
        """
        world_size = check_world_size(world_size)

        def write_down() -> Explicit:
            return (cls.from_rows([row(rank) for rank in range(world_size)]) if whole is None else whole())._explicit

        return cls(world_size, Formula(world_size, row, readers, write_down))

    @property
    def is_formula(self) -> bool:
        """Whether the round comes from :meth:`from_formula`."""
        return isinstance(self._storage, Formula)

    @property
    def _explicit(self) -> Explicit:
        return self._storage.explicit if isinstance(self._storage, Formula) else self._storage

    def matrix(self) -> FloatArray:
        """Return W as a new float64 array of shape ``[n, n]``."""
        return self._explicit.matrix()

    def sparse(self) -> Any:
        """Return W as a new ``scipy.sparse.csr_array`` of shape ``[n, n]``."""
        return self._explicit.sparse()

    def mix(self, values: npt.ArrayLike) -> FloatArray:
        """Return ``W x`` for the values x of all ranks, shape ``[n, ...]``, without a dense W."""
        return self._explicit.mix(self._check_values(values))

    def mix_transposed(self, values: npt.ArrayLike) -> FloatArray:
        """Return ``W^T x`` for x of shape ``[n, ...]``, without a dense W."""
        return self._explicit.mix_transposed(self._check_values(values))

    @property
    def graph(self) -> nx.DiGraph:
        """The round as a new ``networkx.DiGraph``: edge j -> i has ``weight`` W[i, j], self-loops included.

        It is frozen against changes that the round would not see; ``graph.copy()`` is free.
        """
        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.world_size))
        for rank in range(self.world_size):
            row = {rank: self.self_weight(rank), **self.neighbours(rank)}
            graph.add_weighted_edges_from((source, rank, weight) for source, weight in row.items() if weight)
        return nx.freeze(graph)

    def row(self, rank: int) -> dict[int, float]:
        """Return ``{j: W[rank, j]}`` for all that ``rank`` reads, itself included."""
        return self._storage.row(self._check_rank(rank))

    def neighbours(self, rank: int) -> dict[int, float]:
        """Return ``{j: W[rank, j]}`` for the others that ``rank`` reads, by rising j."""
        row = self.row(rank)
        del row[rank]
        return row

    def targets(self, rank: int) -> tuple[int, ...]:
        """Return the others that read ``rank``, in rising order."""
        return self._storage.readers(self._check_rank(rank))

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the others that ``rank`` reads or is read by, in rising order."""
        return tuple(sorted({*self.neighbours(rank), *self.targets(rank)}))

    def self_weight(self, rank: int) -> float:
        """Return ``W[rank, rank]``."""
        return self.row(rank)[rank]

    @property
    def groups(self) -> Groups:
        """The connected components, each sorted, by their smallest rank; a rank that is alone is one too."""
        return self._explicit.groups

    @property
    def uniform_groups(self) -> Groups | None:
        """The groups, if W is 1/g between all pairs of every group of g ranks; else ``None``.

        Such a round can run as one small all-reduce per group.
        """
        return self._explicit.uniform_groups

    @cached_property
    def is_identity(self) -> bool:
        """Whether nothing is sent and every rank keeps what it has."""
        return self._explicit.is_identity

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether ``W[i, j] == W[j, i]`` for all pairs, to the last few bits."""
        return self._explicit.is_symmetric

    @property
    def smallest_weight(self) -> float:
        """The smallest entry of W; 0.0 where a rank does not read another, below 0 for some optimised weights."""
        return self._explicit.smallest_weight

    def edges(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Return readers, senders and weights of all edges, shape ``[edges]`` each, without what a rank keeps.

        By rising reader, then sender; the arrays are not to be written to. A group of g ranks has g (g - 1) edges.
        """
        return self._explicit.edges()

    def num_sources(self) -> IntArray:
        """Return how many others each rank reads, shape ``[n]``."""
        return self._explicit.num_sources()

    def num_targets(self) -> IntArray:
        """Return by how many others each rank is read, shape ``[n]``."""
        return self._explicit.num_targets()

    def row_sums(self) -> FloatArray:
        """Return ``sum_j W[i, j]`` for every i, shape ``[n]``."""
        return self._explicit.row_sums()

    def column_sums(self) -> FloatArray:
        """Return ``sum_i W[i, j]`` for every j, shape ``[n]``."""
        return self._explicit.column_sums()

    def to_dict(self) -> dict[str, Any]:
        """Return the round as plain JSON types; :meth:`from_dict` reads them back exactly."""
        return self._explicit.to_dict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Round:
        """Return the round that :meth:`to_dict` wrote."""
        keys = set(data) if isinstance(data, Mapping) else None
        if keys == {"world_size", "groups"}:
            return cls.from_groups(**data)
        if keys == {"world_size", "targets", "sources", "weights", "self_weights"}:
            return cls.from_edges(**data)
        raise ValueError(
            f"a round needs the keys world_size and groups, or world_size, targets, sources, weights and "
            f"self_weights, got {reprlib.repr(data) if keys is None else sorted(map(str, keys))}; write it with "
            f"Round.to_dict()"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Round):
            return NotImplemented
        if self is other:
            return True
        if self.world_size != other.world_size or self.groups != other.groups:
            return False
        one, two = self._explicit, other._explicit
        if isinstance(one, UniformGroups) and isinstance(two, UniformGroups):
            return True
        return all(one.row(rank) == two.row(rank) for rank in range(self.world_size))

    def __hash__(self) -> int:
        return hash((self.world_size, self.groups))

    def __reduce__(self) -> tuple[Any, ...]:
        return Round, (self.world_size, self._explicit)  # a formula may close over anything

    def __repr__(self) -> str:
        if self.is_formula:
            return f"<Round: a formula for {self.world_size} ranks>"
        if self.is_identity:
            return f"<Round: identity on {self.world_size} ranks>"
        if self.uniform_groups is not None:
            sizes = sorted({len(group) for group in self.groups})
            return f"<Round: {len(self.groups)} uniform groups of {sizes} on {self.world_size} ranks>"
        return f"<Round: {int(self.num_sources().sum())} edges on {self.world_size} ranks>"

    def _check_rank(self, rank: int) -> int:
        return check_integer("rank", rank, minimum=0, maximum=self.world_size - 1)

    def _check_values(self, values: npt.ArrayLike) -> FloatArray:
        array = np.asarray(values, dtype=np.float64)
        if not array.ndim or len(array) != self.world_size:
            raise ValueError(
                f"values must have the shape [{self.world_size}, ...], one row per rank, got {list(array.shape)}; "
                f"stack what the ranks hold"
            )
        return array


def _iterable(argument: str, value: Any, what: str) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise TypeError(f"{argument} must be {what}, got {reprlib.repr(value)} ({type(value).__name__}); pass one")
    return value


def _checked_row(rank: int, row: Any) -> Mapping[int, float]:
    if not isinstance(row, Mapping):
        raise TypeError(
            f"rows[{rank}] must be a mapping {{j: W[{rank}, j]}}, got {reprlib.repr(row)} ({type(row).__name__}); use "
            f"Round.from_matrix for a matrix"
        )
    if {*map(type, row)} <= {int} and {*map(type, row.values())} <= {float}:
        return row
    return {
        check_integer(f"a rank in rows[{rank}]", other, minimum=0): check_real(
            f"a weight in rows[{rank}]", weight, "finite", example=0.5
        )
        for other, weight in row.items()
    }


def _one_each(argument: str, values: npt.ArrayLike, count: int, what: str) -> FloatArray:
    array = weight_array(argument, values)
    if array.shape not in ((), (count,)):
        raise ValueError(
            f"{argument} must have the shape [{count}], one per {what}, or be a single number, got the shape "
            f"{list(array.shape)}; pass one of these"
        )
    return np.broadcast_to(array, (count,))


def _refuse_first(wrong: npt.NDArray[np.bool_], targets: IntArray, sources: IntArray, why: str) -> None:
    if wrong.any():
        edge = int(np.argmax(wrong))
        raise ValueError(f"the edge {sources[edge]} -> {targets[edge]} {why}")

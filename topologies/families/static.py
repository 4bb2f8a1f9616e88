"""Families that repeat one round for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from topologies.registry import register
from topologies.round import Round
from topologies.topology import Topology
from topologies.validation import check_integer, unserved_size
from topologies.weights import weighted_round


@register("complete")
def complete(world_size: int) -> Topology:
    """Everybody with everybody: one group of all ranks, ``W = J``. Exact after one round; this is all-reduce."""
    return _repeat(Round.from_groups(world_size, [range(world_size)]), promised_exact_after=1)


@register("ring")
def ring(world_size: int) -> Topology:
    """1/3 for oneself and for each side; 1/2 and 1/2 for two ranks.

    The second largest eigenvalue is ``1/3 + 2/3 cos(2 pi / n)``.

    References
    ----------
    Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017 (D-PSGD).
    """
    return _repeat(circulant(world_size, (1, -1)))


@register("directed_ring")
def directed_ring(world_size: int) -> Topology:
    """1/2 for oneself, 1/2 for rank i + 1: data flows downwards around the ring.

    References
    ----------
    Assran et al., "Stochastic gradient push for distributed deep learning", 2019.
    """
    return _repeat(circulant(world_size, (1,)))


@register("path")
def path(world_size: int) -> Topology:
    """Ranks in a line, with Metropolis weights."""
    ranks = np.arange(world_size)
    return _repeat(weighted_round(world_size, _pairs(ranks[:-1], ranks[1:])))


@register("star")
def star(world_size: int) -> Topology:
    """Rank 0 with all others, with Metropolis weights: 1/n on every edge.

    A leaf keeps 1 - 1/n, the centre 1/n; the second largest eigenvalue is 1 - 1/n.
    """
    leaves = np.arange(1, world_size)
    return _repeat(weighted_round(world_size, _pairs(np.zeros_like(leaves), leaves)))


@register("grid")
def grid(world_size: int, *, shape: tuple[int, int] | None = None) -> Topology:
    """A grid of a rows and b columns with Metropolis weights; rank = row * b + column.

    Parameters
    ----------
    shape
        ``(a, b)`` with ``a * b = world_size``; by default the most square one.
    """
    rows, columns = _check_shape("grid", world_size, shape)
    ranks = np.arange(world_size).reshape(rows, columns)
    edges = np.concatenate((_pairs(ranks[:-1], ranks[1:]), _pairs(ranks[:, :-1], ranks[:, 1:])))
    return _repeat(weighted_round(world_size, edges), shape=(rows, columns))


@register("torus")
def torus(world_size: int, *, shape: tuple[int, int] | None = None) -> Topology:
    """A grid whose rows and columns are closed to rings, with Metropolis weights; rank = row * b + column.

    For a, b >= 3 the second largest eigenvalue is ``1 - 0.4 (1 - cos(2 pi / max(a, b)))``.

    Parameters
    ----------
    shape
        ``(a, b)`` with ``a * b = world_size``; by default the most square one.
    """
    rows, columns = _check_shape("torus", world_size, shape)
    ranks = np.arange(world_size).reshape(rows, columns)
    edges = np.concatenate((_pairs(ranks, np.roll(ranks, -1, axis=0)), _pairs(ranks, np.roll(ranks, -1, axis=1))))
    # A side of 2 closes to the edge that is there already, a side of 1 to a loop.
    edges = np.unique(np.sort(edges, axis=1), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    return _repeat(weighted_round(world_size, edges), shape=(rows, columns))


@register("hypercube")
def hypercube(world_size: int) -> Topology:
    """Ranks that differ in one bit: i ~ i xor 2^b for all b < d, weights 1/(d + 1), for n = 2^d.

    The second largest eigenvalue is ``(d - 1) / (d + 1)``.
    """
    if world_size & (world_size - 1):
        raise unserved_size("hypercube", world_size, "a power of two", lambda size: not size & (size - 1))
    dimension = world_size.bit_length() - 1
    ranks = np.repeat(np.arange(world_size), dimension)
    bits = np.tile(1 << np.arange(dimension), world_size)
    weight = 1.0 / (dimension + 1)
    return _repeat(Round.from_edges(world_size, ranks, ranks ^ bits, weight, weight))


@register("exponential")
def exponential(world_size: int) -> Topology:
    """i reads i + 2^j mod n for all j < tau = ceil(log2 n), weights 1/(tau + 1).

    The second largest modulus of the eigenvalues is ``1 - 2 / (1 + tau)`` for even n and smaller for odd n.

    References
    ----------
    Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021, Proposition 1.
    """
    return _repeat(circulant(world_size, powers_of_two(world_size)))


@register("undirected_exponential")
def undirected_exponential(world_size: int) -> Topology:
    """i ~ i ± 2^j mod n for all j < ceil(log2 n), equal weights; a neighbour reached twice counts once."""
    hops = powers_of_two(world_size)
    return _repeat(circulant(world_size, (*hops, *(-hop for hop in hops))))


def powers_of_two(world_size: int) -> tuple[int, ...]:
    """Return 2^j for all j < tau = ceil(log2 n): all powers of two below n."""
    return tuple(1 << exponent for exponent in range((world_size - 1).bit_length()))


def circulant(world_size: int, hops: Iterable[int]) -> Round:
    """Return the round in which i reads i + hop mod n for every distinct hop, all and oneself with equal weights."""
    distinct = {hop % world_size for hop in hops} | {0}
    return weighted_circulant(world_size, dict.fromkeys(distinct, 1.0 / len(distinct)))


def weighted_circulant(world_size: int, weights: Mapping[int, float]) -> Round:
    """Return the round with ``W[i, i + hop mod n] = weights[hop]``; the hops are 0 and others, distinct modulo n."""
    others = {hop % world_size: weight for hop, weight in weights.items() if hop % world_size}
    hops = np.array(sorted(others), dtype=np.int64)

    def row(rank: int) -> dict[int, float]:
        return dict(sorted([(rank, weights[0]), *(((rank + hop) % world_size, others[hop]) for hop in others)]))

    def readers(rank: int) -> tuple[int, ...]:
        return tuple(sorted((rank - hop) % world_size for hop in others))

    def whole() -> Round:
        targets = np.repeat(np.arange(world_size), len(hops))
        sources = (targets + np.tile(hops, world_size)) % world_size
        each = np.tile([others[hop] for hop in hops.tolist()], world_size)
        return Round.from_edges(world_size, targets, sources, each, weights[0])

    return Round.from_formula(world_size, row, readers=readers, whole=whole)


def _repeat(round_: Round, *, promised_exact_after: int | None = None, **options: object) -> Topology:
    return Topology(
        round_.world_size, (round_,).__getitem__, 1, promised_exact_after=promised_exact_after, options=options
    )


def _pairs(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.stack((one.reshape(-1), other.reshape(-1)), axis=1)


def _check_shape(family: str, world_size: int, shape: tuple[int, int] | None) -> tuple[int, int]:
    """Return the shape, or the most square one with a <= b."""
    possible = [(a, world_size // a) for a in range(1, world_size + 1) if world_size % a == 0]
    if shape is None:
        return max((a, b) for a, b in possible if a <= b)
    listed = ", ".join(map(str, possible))
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise TypeError(
            f"shape of topology {family!r} must be a pair (rows, columns), got {shape!r}; for world_size "
            f"{world_size} use one of {listed}"
        )
    rows, columns = (check_integer("a side of shape", side, minimum=1) for side in shape)
    if rows * columns != world_size:
        raise ValueError(
            f"shape ({rows}, {columns}) of topology {family!r} has {rows * columns} ranks, world_size is "
            f"{world_size}; use one of {listed}, or world_size {rows * columns}"
        )
    return rows, columns

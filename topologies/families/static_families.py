"""Families that repeat one round forever."""

import warnings
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from topologies.graphs.edge_weights import weighted_round
from topologies.matrix_storage import IntArray
from topologies.round import Round
from topologies.topology import DEFAULT, Topology, register
from topologies.validation import check_integer, check_served, check_stored, divisors, is_power_of_two, listed, powers


@register("complete")
def complete(world_size: int) -> Topology:
    """Everybody with everybody: all ranks average, as all-reduce does.

    One group of all n ranks: ``W = J``, every entry 1/n.

    Properties
    ----------
    sizes : any n
    degree : n - 1
    period : 1
    exact : after 1 round
    rate : SLEM 0
    weights : 1/n, symmetric, one uniform group

    References
    ----------
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Examples
    --------
    >>> topologies.build("complete", 4).round(0).groups
    ((0, 1, 2, 3),)
    """
    check_stored("complete", world_size, float(world_size))
    return _repeat(Round.from_groups(world_size, [range(world_size)]), promised_exact_after=1)


@register("ring")
def ring(world_size: int) -> Topology:
    """A rank averages with both neighbours on a ring, 1/3 each.

    Rank i reads i - 1 and i + 1 mod n, and keeps 1/3. For two ranks both neighbours are the same, with weight 1/2.

    Properties
    ----------
    sizes : any n
    degree : 2
    period : 1
    exact : after 1 round for n <= 3, else never
    rate : SLEM 1/3 + 2/3 cos(2 pi / n) for n >= 3
    weights : 1/3 (1/2 for n = 2), symmetric

    References
    ----------
    Lian et al., "Can decentralized algorithms outperform centralized algorithms?" (D-PSGD), 2017.

    Examples
    --------
    >>> topologies.build("ring", 5).round(0).neighbours(0)
    {1: 0.3333333333333333, 4: 0.3333333333333333}
    """
    return _repeat(circulant(world_size, (1, -1)))


@register("directed_ring")
def directed_ring(world_size: int) -> Topology:
    """A rank averages with what it reads from the next rank on a ring, 1/2 each.

    Rank i reads i + 1 mod n and keeps 1/2: data flows downwards around the ring.

    Properties
    ----------
    sizes : any n
    degree : 1
    period : 1
    exact : after 1 round for n = 2, else never
    rate : SLEM cos(pi / n)
    weights : 1/2, directed, doubly stochastic

    References
    ----------
    Assran et al., "Stochastic gradient push for distributed deep learning", 2019.

    Examples
    --------
    >>> topologies.build("directed_ring", 5).round(0).neighbours(4)
    {0: 0.5}
    """
    return _repeat(circulant(world_size, (1,)))


@register("path")
def path(world_size: int) -> Topology:
    """A rank averages with its neighbours in a line, with Metropolis weights.

    Rank i reads i - 1 and i + 1, where they exist, with weight 1/3 each (1/2 for two ranks) and keeps the rest: 1/3, or
    2/3 at the two ends.

    Properties
    ----------
    sizes : any n
    degree : at most 2
    period : 1
    exact : after 1 round for n = 2, else never
    rate : SLEM 1/3 + 2/3 cos(pi / n) for n >= 3
    weights : 1/3 (1/2 for n = 2), symmetric

    References
    ----------
    Xiao, Boyd and Lall, "A scheme for robust distributed sensor fusion based on average consensus", 2005, section 3.

    Examples
    --------
    >>> topologies.build("path", 4).round(0).neighbours(0)
    {1: 0.3333333333333333}
    """
    check_stored("path", world_size, 2.0 * world_size)
    ranks = np.arange(world_size)
    return _repeat(weighted_round(world_size, _pairs(ranks[:-1], ranks[1:])))


@register("star")
def star(world_size: int) -> Topology:
    """Rank 0 exchanges with all others, with Metropolis weights.

    Every edge has the weight 1/n. A leaf keeps 1 - 1/n, the centre 1/n: the centre holds the mean after one round, but
    the leaves come closer to it slowly.

    Properties
    ----------
    sizes : any n
    degree : n - 1 for rank 0, 1 for the others
    period : 1
    exact : after 1 round for n = 2, else never
    rate : SLEM 1 - 1/n for n >= 3
    weights : 1/n, symmetric

    References
    ----------
    Xiao, Boyd and Lall, "A scheme for robust distributed sensor fusion based on average consensus", 2005, section 3.

    Examples
    --------
    >>> star = topologies.build("star", 4).round(0)
    >>> star.neighbours(3), star.self_weight(3)
    ({0: 0.25}, 0.75)
    """
    check_stored("star", world_size, 2.0 * world_size)
    leaves = np.arange(1, world_size)
    return _repeat(weighted_round(world_size, _pairs(np.zeros_like(leaves), leaves)))


@register("grid")
def grid(world_size: int, *, shape: tuple[int, int] | None = None) -> Topology:
    """A rank averages with its neighbours on a grid of a rows and b columns, with Metropolis weights.

    Rank = row * b + column. An edge between ranks of degrees d and e has the weight 1 / (1 + max(d, e)).

    Properties
    ----------
    sizes : any n = a b
    degree : at most 4
    period : 1
    exact : after 1 round for n = 2, else never
    rate : measured: SLEM 0.869 on 4 x 4
    weights : 1 / (1 + the larger degree), symmetric

    Parameters
    ----------
    shape
        ``(a, b)`` with ``a * b = world_size``; by default the most square one. For a prime number of ranks that is a
        ring, of which a warning tells.

    References
    ----------
    Xiao, Boyd and Lall, "A scheme for robust distributed sensor fusion based on average consensus", 2005, section 3.

    Examples
    --------
    >>> topologies.build("grid", 6, shape=(2, 3)).round(0).peers(1)
    (0, 2, 4)
    """
    ranks = _lattice("grid", world_size, shape)
    edges = np.concatenate((_pairs(ranks[:-1], ranks[1:]), _pairs(ranks[:, :-1], ranks[:, 1:])))
    return _repeat(weighted_round(world_size, edges), shape=ranks.shape)


@register("torus")
def torus(world_size: int, *, shape: tuple[int, int] | None = None) -> Topology:
    """A rank averages with its neighbours on a grid whose rows and columns are closed to rings.

    Rank = row * b + column on a rows and b columns, with Metropolis weights: 1/5 on every edge for a, b >= 3. Where a
    side is 2 both neighbours along it are the same rank, where it is 1 there are none.

    Properties
    ----------
    sizes : any n = a b
    degree : at most 4
    period : 1
    exact : after 1 round for n <= 3, else never
    rate : SLEM 1 - 2/5 (1 - cos(2 pi / max(a, b))) for a, b >= 3
    weights : 1 / (1 + degree), symmetric

    Parameters
    ----------
    shape
        ``(a, b)`` with ``a * b = world_size``; by default the most square one.

    References
    ----------
    Xiao, Boyd and Lall, "A scheme for robust distributed sensor fusion based on average consensus", 2005, section 3.

    Examples
    --------
    >>> topologies.build("torus", 9).round(0).neighbours(0)
    {1: 0.2, 2: 0.2, 3: 0.2, 6: 0.2}
    """
    ranks = _lattice("torus", world_size, shape)
    edges = np.concatenate((_pairs(ranks, np.roll(ranks, -1, axis=0)), _pairs(ranks, np.roll(ranks, -1, axis=1))))
    # A side of 2 closes to the edge that is there already, a side of 1 to a loop.
    return _repeat(weighted_round(world_size, simple_edges(world_size, edges)), shape=ranks.shape)


@register("hypercube")
def hypercube(world_size: int) -> Topology:
    """A rank averages with all ranks whose number differs from its own in one bit.

    Rank i reads i xor 2^b for all b < d, and keeps 1 / (d + 1), for n = 2^d.

    Properties
    ----------
    sizes : n = 2^d
    degree : d
    period : 1
    exact : after 1 round for n = 2, else never
    rate : SLEM (d - 1) / (d + 1)
    weights : 1 / (d + 1), symmetric

    References
    ----------
    Brouwer and Haemers, "Spectra of graphs", 2012, section 1.4.

    Examples
    --------
    >>> topologies.build("hypercube", 8).round(0).neighbours(5)
    {1: 0.25, 4: 0.25, 7: 0.25}
    """
    check_served("hypercube", world_size, "a power of two", is_power_of_two)
    dimension = world_size.bit_length() - 1
    check_stored("hypercube", world_size, float(world_size * dimension))
    ranks = np.repeat(np.arange(world_size), dimension)
    bits = np.tile(1 << np.arange(dimension), world_size)
    weight = 1.0 / (dimension + 1)
    return _repeat(Round.from_edges(world_size, ranks, ranks ^ bits, weight, weight))


@register("exponential")
def exponential(world_size: int) -> Topology:
    """A rank averages with what it reads from the ranks 1, 2, 4, 8, .. further on.

    Rank i reads i + 2^j mod n for all j < tau = ceil(log2 n), and keeps 1 / (tau + 1).

    Properties
    ----------
    sizes : any n
    degree : tau = ceil(log2 n)
    period : 1
    exact : after 1 round for n <= 3, else never
    rate : SLEM 1 - 2 / (1 + tau) for even n, smaller for odd n
    weights : 1 / (tau + 1), directed, doubly stochastic

    References
    ----------
    Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021, Proposition 1.

    Examples
    --------
    >>> topologies.build("exponential", 8).round(0).neighbours(6)
    {0: 0.25, 2: 0.25, 7: 0.25}
    """
    return _repeat(circulant(world_size, powers(2, world_size - 1)))


@register("undirected_exponential")
def undirected_exponential(world_size: int) -> Topology:
    """A rank averages with the ranks at distances 1, 2, 4, 8, .. on both sides, with equal weights.

    Rank i reads i + 2^j and i - 2^j mod n for all j < tau = ceil(log2 n); a rank that is reached twice counts once.

    Properties
    ----------
    sizes : any n
    degree : at most 2 tau, tau = ceil(log2 n)
    period : 1
    exact : after 1 round for n in 2, 3, 4, 5, 7, else never
    rate : measured: SLEM 1/2 for n = 16
    weights : 1 / (degree + 1), symmetric

    References
    ----------
    Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021 (the directed graph, of
    which this is the symmetric form).

    Examples
    --------
    >>> topologies.build("undirected_exponential", 8).round(0).peers(0)
    (1, 2, 4, 6, 7)
    """
    hops = powers(2, world_size - 1)
    return _repeat(circulant(world_size, (*hops, *(-hop for hop in hops))))


def circulant(world_size: int, hops: Iterable[int]) -> Round:
    """Return the round in which i reads i + hop mod n for every distinct hop, with equal weights, its own too."""
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
        edge_weights = np.tile([others[hop] for hop in hops.tolist()], world_size)
        return Round.from_edges(world_size, targets, sources, edge_weights, weights[0])

    return Round.from_formula(world_size, row, readers=readers, whole=whole)


def simple_edges(world_size: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return every edge of a multigraph once, in order, and no loop; shape ``[edges, 2]``."""
    one, other = edges.min(axis=1), edges.max(axis=1)
    keys = np.unique((one * world_size + other)[one != other])
    return np.stack(np.divmod(keys, world_size), axis=1)


def _repeat(round_: Round, *, promised_exact_after: int | None = None, **options: object) -> Topology:
    return Topology(
        round_.world_size, (round_,).__getitem__, 1, promised_exact_after=promised_exact_after, options=options
    )


def _pairs(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.stack((one.reshape(-1), other.reshape(-1)), axis=1)


def _lattice(family: str, world_size: int, shape: tuple[int, int] | None) -> IntArray:
    """Return the ranks in this shape, or in the most square one with a <= b."""
    if shape is None:
        rows = max(divisor for divisor in divisors(world_size) if divisor * divisor <= world_size)
        if rows == 1 and world_size > 3:
            line = "ring" if family == "torus" else "path"
            warnings.warn(
                f"topology {family!r} for {world_size} ranks, a prime number, is 1 x {world_size}, and so the {line}, "
                f"which agrees slowly; choose {DEFAULT!r} or another topology, or a world_size that is no prime",
                stacklevel=5,  # who calls topologies.build
            )
        shape = rows, world_size // rows
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise TypeError(f"shape of topology {family!r} must be a pair (rows, columns), got {shape!r}; pass one")
    rows, columns = (check_integer("a side of shape", side, minimum=1) for side in shape)
    if rows * columns != world_size:
        raise ValueError(
            f"shape ({rows}, {columns}) of topology {family!r} has {rows * columns} ranks, world_size is "
            f"{world_size}; use world_size {rows * columns}, or rows out of {listed(divisors(world_size))}"
        )
    check_stored(family, world_size, 4.0 * world_size)
    return np.arange(world_size).reshape(rows, columns)

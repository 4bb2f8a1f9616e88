"""EquiTopo: circulants and matchings at random hops, whose rate does not depend on the number of ranks."""

from collections import Counter

import numpy as np

from topologies.families.static_families import weighted_circulant
from topologies.round import Round
from topologies.topology import Topology, register
from topologies.validation import check_integer, check_real

_MOST_HOPS = 10**6


@register("equi_static", variants=lambda *_: [{"directed": directed} for directed in (False, True)])
def equi_static(world_size: int, *, m: int | None = None, seed: int = 0, directed: bool = False) -> Topology:
    """The mean of m circulants at random hops: i reads i + u_s mod n, and i - u_s if undirected, in every round.

    The hops u_1 .. u_m are independent and uniform on 1 .. n - 1. Directed, with (P_u x)_i = x_(i + u mod n),
    ``W = 1/m sum_s (I/n + (n - 1)/n P_(u_s))``; equal hops add up. Undirected it is ``(W + W^T) / 2``.

    Properties
    ----------
    sizes : any n
    degree : at most m directed, at most 2 m undirected
    period : 1
    exact : never promised
    rate : directed E||W x||^2 = (1 - 2/n)/m ||x||^2 off the mean; beta O(1) in n for m = O(log n)
    weights : (n - 1)/(n m) per hop, 1/n for itself, doubly stochastic; symmetric if undirected

    Parameters
    ----------
    m
        Number of hops, 1 to 1,000,000; by default ceil(log2 n), as many as `exponential` has.
    seed
        At least 0; the hops follow from it.
    directed
        Whether a rank reads in one direction only.

    References
    ----------
    Song et al., "Communication-efficient topologies for decentralized learning with O(1) consensus rate", 2022,
    D-EquiStatic and U-EquiStatic.

    Examples
    --------
    >>> topologies.build("equi_static", 5, m=1, directed=True).round(0).neighbours(0)
    {4: 0.8}
    """
    m = (world_size - 1).bit_length() if m is None else check_integer("m", m, minimum=1, maximum=_MOST_HOPS)
    seed = check_integer("seed", seed, minimum=0)
    _check_directed("equi_static", directed)
    hops = np.random.default_rng((seed,)).integers(1, world_size, size=m).tolist()
    ways = Counter(hops) if directed else Counter(hops) + Counter(world_size - hop for hop in hops)
    weight_per_way = (world_size - 1) / (world_size * ways.total())
    round_ = weighted_circulant(world_size, {0: 1 / world_size} | {hop: ways[hop] * weight_per_way for hop in ways})
    return Topology(world_size, lambda _: round_, 1, options={"m": m})


@register("equi_dyn", variants=lambda *_: [{"directed": directed} for directed in (False, True)])
def equi_dyn(world_size: int, *, seed: int = 0, directed: bool = False, eta: float = 0.5) -> Topology:
    """One random hop u a round: directed, i reads i + u mod n; undirected, a matching of ranks u apart.

    ``W = (1 - eta) I + eta (I/n + (n - 1)/n P)``. Directed, (P x)_i = x_(i + u mod n). Undirected, P swaps the pairs
    of a matching: walk i = s, s + 1, .. mod n from a random rank s and pair i with i + u mod n if both are still free;
    who stays free is idle. Round t draws u, uniform on 1 .. n - 1, and s from (seed, t) alone.

    Properties
    ----------
    sizes : any n
    degree : 1
    period : none (random)
    exact : never promised
    rate : directed E||W x||^2 = (1 - 2 eta (1 - eta) - 2 eta^2/n) ||x||^2 off the mean; undirected < 0.6 for eta 1/2
    weights : eta (n - 1)/n, doubly stochastic; symmetric if undirected

    Parameters
    ----------
    seed
        At least 0; the hop of round t follows from (seed, t).
    directed
        Whether the rank read is another one than the rank sent to.
    eta
        How far a round goes, above 0 and at most 1. For many ranks 1/2 is best; near 1 the ranks swap what they hold
        rather than mix it.

    References
    ----------
    Song et al., "Communication-efficient topologies for decentralized learning with O(1) consensus rate", 2022,
    OD-EquiDyn and OU-EquiDyn.

    Examples
    --------
    >>> topologies.build("equi_dyn", 5, directed=True).round(0).neighbours(0)
    {4: 0.4}
    """
    seed = check_integer("seed", seed, minimum=0)
    _check_directed("equi_dyn", directed)
    eta = check_real("eta", eta, "above 0 and at most 1", example=0.5)
    weight = eta * (world_size - 1) / world_size

    def circulant(_: int, generator: np.random.Generator) -> Round:
        hop = int(generator.integers(1, world_size))
        return weighted_circulant(world_size, {0: 1.0 - weight, hop: weight})

    def matching(_: int, generator: np.random.Generator) -> Round:
        hop, start = int(generator.integers(1, world_size)), int(generator.integers(world_size))

        def row(rank: int) -> dict[int, float]:
            partner = partner_in_walk(world_size, hop, (rank - start) % world_size)
            return {} if partner is None else {(partner + start) % world_size: weight}

        return Round.from_formula(world_size, row)

    return Topology.from_function(
        circulant if directed else matching, seed=seed, symmetric=not directed or world_size == 2
    )


def partner_in_walk(world_size: int, hop: int, rank: int) -> int | None:
    """Return whom a walk over i = 0, 1, .. pairs a rank with, if it pairs i with i + hop mod n while both are free.

    For 2 hop <= n the walk pairs the first ``hop`` of each 2 hop ranks with the next ``hop``; those whose partner would
    be beyond the end find the beginning taken. Else it pairs the first n - hop ranks with the last n - hop ones.
    Those between them then step back by n - hop, which is forward by hop modulo n, so they pair among themselves.

    Examples
    --------
    >>> [partner_in_walk(7, 2, rank) for rank in range(7)]
    [2, 3, 0, 1, 6, None, 4]
    """
    reach, first, end = hop, 0, world_size
    if 2 * hop > world_size:
        reach = world_size - hop
        if rank < reach:
            return rank + hop
        if rank >= hop:
            return rank - hop
        first, end = reach, hop
    if (rank - first) // reach % 2:
        return rank - reach
    return rank + reach if rank + reach < end else None


def _check_directed(family: str, directed: object) -> None:
    if not isinstance(directed, bool):
        raise TypeError(
            f"directed of topology {family!r} must be True or False, got {directed!r} ({type(directed).__name__}); "
            f"pass one of these"
        )

"""Expanders in closed form: few neighbours, and a gap that stays away from 0 as n grows."""

import math

import numpy as np

from topologies.families.given_graph import weighted_topology
from topologies.families.static_families import simple_edges
from topologies.topology import Topology, register
from topologies.validation import check_served, check_stored, is_prime


@register("margulis")
def margulis(world_size: int, *, weights: str = "metropolis") -> Topology:
    """The expander of Margulis, Gabber and Galil on an m x m torus of ranks, as a simple graph; Metropolis weights.

    Rank x m + y, for x and y modulo m with m^2 = n, is joined to (x ± 2y, y), (x ± (2y + 1), y), (x, y ± 2x) and
    (x, y ± (2x + 1)). Loops and second edges of the same pair are left out.

    Properties
    ----------
    sizes : squares m^2
    degree : at most 8
    period : 1
    exact : never promised; after 1 round for no n above 1
    rate : second eigenvalue of the 8-regular multigraph at most 5 sqrt(2), for every n
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph".

    References
    ----------
    Gabber and Galil, "Explicit constructions of linear-sized superconcentrators", 1981.
    Hoory, Linial and Wigderson, "Expander graphs and their applications", 2006, Construction 8.1, Theorem 8.2.

    Examples
    --------
    >>> topologies.build("margulis", 16).round(0).peers(0)
    (1, 3, 4, 12)
    """
    side = math.isqrt(world_size)
    check_served(
        "margulis",
        world_size,
        "a square",
        lambda size: math.isqrt(size) ** 2 == size,
        sparse=(side**2, (side + 1) ** 2),
    )
    check_stored("margulis", world_size, 8.0 * world_size)
    x, y = np.divmod(np.arange(world_size), side)
    vertical = [((x + 2 * y + shift) % side) * side + y for shift in (0, 1)]
    horizontal = [x * side + (y + 2 * x + shift) % side for shift in (0, 1)]
    edges = np.stack((np.tile(x * side + y, 4), np.concatenate(vertical + horizontal)), axis=1)
    return weighted_topology(world_size, simple_edges(world_size, edges), weights)


@register("chordal")
def chordal(world_size: int, *, weights: str = "metropolis") -> Topology:
    """A ring of a prime number of ranks in which each is also joined to its inverse modulo n; Metropolis weights.

    i ~ i + 1, i - 1 and 1 / i mod n; ranks 0, 1 and n - 1 are their own inverses and have no chord.

    Properties
    ----------
    sizes : primes
    degree : at most 3
    period : 1
    exact : never promised; after 1 round for n <= 3
    rate : SLEM as measured by describe(); bounded away from 1 for every n
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph".

    References
    ----------
    Lubotzky, "Discrete groups, expanding graphs and invariant measures", 1994, Theorem 4.4.2.

    Examples
    --------
    >>> topologies.build("chordal", 7).round(0).peers(3)
    (2, 4, 5)
    """
    check_served("chordal", world_size, "a prime", is_prime)
    check_stored("chordal", world_size, 3.0 * world_size)
    ranks = np.arange(world_size)
    inverses = np.array([0, *(pow(rank, -1, world_size) for rank in range(1, world_size))])
    ends = np.concatenate((ranks + 1, inverses)) % world_size
    return weighted_topology(world_size, simple_edges(world_size, np.stack((np.tile(ranks, 2), ends), axis=1)), weights)


@register("paley")
def paley(world_size: int, *, weights: str = "metropolis") -> Topology:
    """Ranks whose difference is a square modulo the prime n = 4 k + 1; half of all pairs, 1/(1 + (n - 1) / 2).

    i ~ j if i - j = x^2 mod n for some x. Primes only: Paley graphs of prime powers are not built.

    Properties
    ----------
    sizes : primes n = 1 mod 4
    degree : (n - 1) / 2
    period : 1
    exact : never
    rate : SLEM (1 + sqrt(n)) / (1 + n)
    weights : 2 / (1 + n), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph"; with "best_constant" the SLEM is 1 / sqrt(n).

    References
    ----------
    Paley, "On orthogonal matrices", 1933. Brouwer and Haemers, "Spectra of graphs", 2012, section 1.4.

    Examples
    --------
    >>> topologies.build("paley", 13).round(0).peers(0)
    (1, 3, 4, 9, 10, 12)
    """
    check_served("paley", world_size, "a prime of the form 4 k + 1", lambda size: size % 4 == 1 and is_prime(size))
    check_stored("paley", world_size, world_size * (world_size - 1) / 2)
    half = np.arange(1, (world_size + 1) // 2)
    squares = half * half % world_size
    # The negative of a square is one too: of every pair of hops the shorter gives each edge once.
    hops = np.sort(squares[squares < world_size - squares])
    ranks = np.repeat(np.arange(world_size), len(hops))
    ends = (ranks + np.tile(hops, world_size)) % world_size
    return weighted_topology(world_size, np.stack((ranks, ends), axis=1), weights)

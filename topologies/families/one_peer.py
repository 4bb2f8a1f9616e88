"""Families in which a rank sends to one other, at most, and reads one other in every round."""

import numpy as np

from topologies.families.static_families import circulant
from topologies.families.uniform_groups import hyper_cuboid
from topologies.round import Round
from topologies.topology import Topology, register
from topologies.validation import check_integer, check_served, check_stored, is_power_of_two, prime_factors


@register("one_peer_ring")
def one_peer_ring(world_size: int) -> Topology:
    """The two perfect matchings of an even ring in turn: every rank averages with one neighbour, then with the other.

    Even rounds pair (0, 1)(2, 3).., odd rounds (n-1, 0)(1, 2).. Known as `ring` in Decent-DP.

    Properties
    ----------
    sizes : even n
    degree : 1
    period : 2 (1 for n = 2)
    exact : after 1 round for n = 2 and 2 rounds for n = 4, else never
    rate : beta cos(2 pi / n) after a period, n >= 4
    weights : 1/2, symmetric, pairs

    References
    ----------
    Wang et al., "From promise to practice: realizing high-performance decentralized training" (Decent-DP), 2025.

    Examples
    --------
    >>> topologies.build("one_peer_ring", 6).round(1).groups
    ((0, 5), (1, 2), (3, 4))
    """
    check_served("one_peer_ring", world_size, "even", lambda size: size % 2 == 0)

    def matching(t: int) -> Round:
        return Round.from_formula(world_size, lambda rank: {(((rank + t) ^ 1) - t) % world_size: 0.5})

    # On two ranks both matchings are the same pair.
    return Topology(world_size, matching, 1 if world_size == 2 else 2)


@register("one_peer_exponential")
def one_peer_exponential(world_size: int) -> Topology:
    """Round t: a rank averages with what it reads from the one rank 2^(t mod tau) further on, 1/2 each.

    Rank i reads i + 2^(t mod tau) mod n, with tau = ceil(log2 n). Any number of ranks. The rank read is not the rank
    sent to; see :func:`one_peer_hypercube` for pairs.

    Properties
    ----------
    sizes : any n
    degree : 1
    period : tau = ceil(log2 n)
    exact : after tau rounds for n = 2^k, else never
    rate : beta max over 0 < k < n of abs(sin(2^tau pi k / n)) / (2^tau sin(pi k / n)) after a period
    weights : 1/2, directed, doubly stochastic

    References
    ----------
    Assran et al., "Stochastic gradient push for distributed deep learning", 2019.
    Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021, Lemma 1.

    Examples
    --------
    >>> [topologies.build("one_peer_exponential", 6).round(t).neighbours(3) for t in range(3)]
    [{4: 0.5}, {5: 0.5}, {1: 0.5}]
    """
    num_hops = (world_size - 1).bit_length()
    return Topology(
        world_size,
        lambda t: circulant(world_size, (1 << t,)),
        num_hops,
        promised_exact_after=num_hops if is_power_of_two(world_size) else None,
    )


@register("one_peer_hypercube")
def one_peer_hypercube(world_size: int) -> Topology:
    """Round t: every rank averages with the one rank whose number differs from its own in bit t mod k.

    The pairs of round t are (i, i xor 2^(t mod k)), for n = 2^k. Known as `one-peer-exp` in Decent-DP.

    Properties
    ----------
    sizes : n = 2^k
    degree : 1
    period : k
    exact : after k rounds
    rate : beta 0 after a period
    weights : 1/2, symmetric, pairs

    References
    ----------
    Shi et al., "Finite-time convergent gossiping", 2016.
    Wang et al., "From promise to practice: realizing high-performance decentralized training" (Decent-DP), 2025.

    Examples
    --------
    >>> topologies.build("one_peer_hypercube", 8).round(1).groups
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """
    check_served("one_peer_hypercube", world_size, "a power of two", is_power_of_two)
    return hyper_cuboid(world_size, factors=prime_factors(world_size))


@register("random_matching")
def random_matching(world_size: int, *, seed: int = 0) -> Topology:
    """A uniformly random perfect matching in every round, weights 1/2; with an odd number one rank is idle.

    Neighbours in a random order of the ranks are a pair.

    Properties
    ----------
    sizes : any n
    degree : at most 1
    period : none (random)
    exact : not promised
    rate : expected squared distance times (n - 2) / (2 (n - 1)) in a round for even n, 1/2 for odd n
    weights : 1/2, symmetric, pairs

    Parameters
    ----------
    seed
        At least 0; the matching of round t follows from (seed, t).

    References
    ----------
    Lian et al., "Asynchronous decentralized parallel stochastic gradient descent" (AD-PSGD), 2018.

    Examples
    --------
    >>> sorted(len(group) for group in topologies.build("random_matching", 5, seed=1).round(7).groups)
    [1, 2, 2]
    """
    seed = check_integer("seed", seed, minimum=0)
    check_stored("random_matching", world_size, float(world_size))

    def matching(_: int, generator: np.random.Generator) -> Round:
        order = generator.permutation(world_size)
        pairs = order[: world_size - world_size % 2].reshape(-1, 2)
        partner = np.arange(world_size)
        partner[pairs] = pairs[:, ::-1]

        def row(rank: int) -> dict[int, float]:
            other = int(partner[rank])
            return {other: 0.5} if other != rank else {}

        return Round.from_formula(world_size, row, whole=lambda: Round.from_groups(world_size, pairs.tolist()))

    return Topology.from_function(matching, seed=seed, symmetric=True)

"""Families in which a rank sends to one other and reads one other in every round."""

from __future__ import annotations

import numpy as np

from topologies.families.groups import strided_groups
from topologies.families.static import circulant
from topologies.registry import register
from topologies.round import Round
from topologies.topology import Topology
from topologies.validation import unserved_size


@register("one_peer_ring")
def one_peer_ring(world_size: int) -> Topology:
    """The two perfect matchings of an even ring in turn: (0, 1)(2, 3).. and (n-1, 0)(1, 2).., weights 1/2.

    Known as `ring` in Decent-DP (2025). Exact for two and four ranks.
    """
    if world_size % 2:
        raise unserved_size("one_peer_ring", world_size, "even", lambda size: size % 2 == 0)

    def matching(t: int) -> Round:
        ranks = (np.arange(world_size) - t) % world_size
        return Round.from_groups(world_size, ranks.reshape(-1, 2).tolist())

    # On two ranks both matchings are the same pair.
    return Topology(world_size, matching, 1 if world_size == 2 else 2)


@register("one_peer_exponential")
def one_peer_exponential(world_size: int) -> Topology:
    """Round t: 1/2 for oneself, 1/2 for rank i + 2^(t mod tau) mod n, with tau = ceil(log2 n).

    Any number of ranks. Exact after tau rounds if n is a power of two, never otherwise. Directed: the rank read
    is not the rank sent to; see :func:`one_peer_hypercube` for pairs.

    References
    ----------
    Assran et al., "Stochastic gradient push for distributed deep learning", 2019.
    Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021, Lemma 1.
    """
    num_hops = (world_size - 1).bit_length()
    power_of_two = not world_size & (world_size - 1)
    return Topology(
        world_size,
        lambda t: circulant(world_size, (1 << t,)),
        num_hops,
        promised_exact_after=num_hops if power_of_two else None,
    )


@register("one_peer_hypercube")
def one_peer_hypercube(world_size: int) -> Topology:
    """Round t: the pairs (i, i xor 2^t), weights 1/2, for n = 2^k; exact after the k rounds of a period.

    Known as `one-peer-exp` in Decent-DP (2025).
    """
    if world_size & (world_size - 1):
        raise unserved_size("one_peer_hypercube", world_size, "a power of two", lambda size: not size & (size - 1))
    num_bits = world_size.bit_length() - 1

    return Topology(
        world_size, lambda t: strided_groups(world_size, 1 << t, 2), num_bits, promised_exact_after=num_bits
    )

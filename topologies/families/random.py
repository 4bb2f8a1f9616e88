"""Families whose rounds are drawn at random, each from (seed, t) alone."""

from __future__ import annotations

import numpy as np

from topologies.registry import register
from topologies.round import Round
from topologies.topology import Topology


@register("random_matching")
def random_matching(world_size: int, *, seed: int = 0) -> Topology:
    """A uniformly random perfect matching in every round, weights 1/2; with an odd number one rank is idle.

    Parameters
    ----------
    seed
        At least 0; the matching of round t follows from (seed, t).

    References
    ----------
    Lian et al., "Asynchronous decentralized parallel stochastic gradient descent" (AD-PSGD), 2018.
    """

    def matching(_: int, generator: np.random.Generator) -> Round:
        # Neighbours in a uniform order form a uniform matching.
        order = generator.permutation(world_size)[: world_size - world_size % 2]
        return Round.from_groups(world_size, order.reshape(-1, 2).tolist())

    return Topology.from_function(matching, seed=seed, symmetric=True)

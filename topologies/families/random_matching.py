"""Families whose rounds are drawn at random, each from (seed, t) alone."""

from __future__ import annotations

import numpy as np

from topologies.family_registry import register
from topologies.round import Round
from topologies.topology import Topology
from topologies.validation import check_integer, check_stored


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
    >>> import topologies
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

"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from gossip.algorithms.adapt_then_combine import AdaptThenCombine
from gossip.algorithms.adapt_while_communicating import AdaptWhileCommunicating
from gossip.algorithms.base import Algorithm
from gossip.algorithms.exact_diffusion import ExactDiffusion
from gossip.algorithms.gradient_tracking import GradientTracking
from gossip.algorithms.momentum_exchange import MomentumExchange
from gossip.algorithms.push_sum import PushSum
from topologies.registry import Registry

ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm",
    {
        "adapt_while_communicating": AdaptWhileCommunicating,
        "awc": AdaptWhileCommunicating,
        "adapt_then_combine": AdaptThenCombine,
        "atc": AdaptThenCombine,
        "exact_diffusion": ExactDiffusion,
        "gradient_tracking": GradientTracking,
        "momentum_exchange": MomentumExchange,
        "push_sum": PushSum,
    },
)
"""With their default constants; ``gossip.ALGORITHMS.register(name)`` decorates one of a user's own."""


def resolve_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm itself, or one with the default constants by its name.

    Raises
    ------
    ValueError, TypeError
        There is none of that name; neither a name nor an algorithm.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name or a gossip.Algorithm, got {algorithm!r}; pass e.g. AdaptThenCombine()"
        )
    return ALGORITHMS.get(algorithm)()

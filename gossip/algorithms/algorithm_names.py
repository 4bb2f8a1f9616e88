"""Algorithms by name."""

from __future__ import annotations

from gossip.algorithms.adapt_then_combine import AdaptThenCombine
from gossip.algorithms.adapt_while_communicating import AdaptWhileCommunicating
from gossip.algorithms.base import Algorithm

_BY_NAME: dict[str, type[Algorithm]] = {
    "adapt_while_communicating": AdaptWhileCommunicating,
    "adapt_then_combine": AdaptThenCombine,
}


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
    if algorithm not in _BY_NAME:
        raise ValueError(f"there is no algorithm {algorithm!r}; choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[algorithm]()

"""Update rules: when a rank combines its values with what it got, and how."""

from gossip.algorithms.adapt_then_combine import AdaptThenCombine as AdaptThenCombine
from gossip.algorithms.adapt_while_communicating import AdaptWhileCommunicating as AdaptWhileCommunicating
from gossip.algorithms.algorithm_names import resolve_algorithm as resolve_algorithm
from gossip.algorithms.base import Algorithm as Algorithm

__all__ = ["AdaptThenCombine", "AdaptWhileCommunicating", "Algorithm", "resolve_algorithm"]

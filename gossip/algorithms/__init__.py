"""Update rules: when a rank combines its values with what it got, how, and what it keeps. One file each."""

from gossip.algorithms.adapt_then_combine import AdaptThenCombine as AdaptThenCombine
from gossip.algorithms.adapt_while_communicating import AdaptWhileCommunicating as AdaptWhileCommunicating
from gossip.algorithms.algorithm_names import ALGORITHMS as ALGORITHMS
from gossip.algorithms.algorithm_names import resolve_algorithm as resolve_algorithm
from gossip.algorithms.base import VALUES as VALUES
from gossip.algorithms.base import Algorithm as Algorithm
from gossip.algorithms.base import Requires as Requires
from gossip.algorithms.bucket_view import Arrived as Arrived
from gossip.algorithms.bucket_view import BucketView as BucketView
from gossip.algorithms.exact_diffusion import ExactDiffusion as ExactDiffusion
from gossip.algorithms.gradient_tracking import GradientTracking as GradientTracking
from gossip.algorithms.momentum_exchange import MomentumExchange as MomentumExchange
from gossip.algorithms.push_sum import PushSum as PushSum

__all__ = [
    "ALGORITHMS",
    "VALUES",
    "AdaptThenCombine",
    "AdaptWhileCommunicating",
    "Algorithm",
    "Arrived",
    "BucketView",
    "ExactDiffusion",
    "GradientTracking",
    "MomentumExchange",
    "PushSum",
    "Requires",
    "resolve_algorithm",
]

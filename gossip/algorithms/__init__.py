"""Update rules: when and how a rank combines its values with what it received, and what state it keeps."""

from collections.abc import Callable

from gossip.algorithms.adam_tracking import AdamTracking
from gossip.algorithms.adapt_and_combine import AdaptThenCombine, AdaptWhileCommunicating
from gossip.algorithms.asynchronous import Asynchronous
from gossip.algorithms.base import VALUES as VALUES
from gossip.algorithms.base import Algorithm, Kept, Requires
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.decentlam import DecentLaM
from gossip.algorithms.desloc import DESLOC
from gossip.algorithms.diloco import DiLoCo
from gossip.algorithms.factored_gossip import FactoredGossip
from gossip.algorithms.gasloc import GASLoC
from gossip.algorithms.gossip_pga import GossipPGA
from gossip.algorithms.gradient_tracking import GradientTracking
from gossip.algorithms.integral_correction import ExactDiffusion, Extra, IntegralCorrection
from gossip.algorithms.momentum_exchange import MomentumExchange
from gossip.algorithms.momentum_tracking import MomentumTracking
from gossip.algorithms.noloco import NoLoCo
from gossip.algorithms.push_sum import PushSum
from gossip.algorithms.quasi_global_integral import QuasiGlobalIntegral
from gossip.algorithms.quasi_global_momentum import QuasiGlobalMomentum
from gossip.algorithms.relay_sum import RelaySum
from gossip.algorithms.slowmo import SlowMo
from gossip.algorithms.sparse_loco import SparseLoCo
from gossip.algorithms.streaming_diloco import StreamingDiLoCo
from topologies.registry import Registry

__all__ = [
    "ALGORITHMS", "DESLOC", "AdamTracking", "AdaptThenCombine", "AdaptWhileCommunicating", "Algorithm", "Arrived",
    "Asynchronous", "BucketView", "DecentLaM", "DiLoCo", "ExactDiffusion", "Extra", "FactoredGossip", "GASLoC",
    "GossipPGA", "GradientTracking", "IntegralCorrection", "Kept", "MomentumExchange", "MomentumTracking", "NoLoCo",
    "PushSum", "QuasiGlobalIntegral", "QuasiGlobalMomentum", "RelaySum", "Requires", "SlowMo", "SparseLoCo",
    "StreamingDiLoCo",
]  # fmt: skip

ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm",
    {
        "adam_tracking": AdamTracking,
        "adapt_while_communicating": AdaptWhileCommunicating,
        "awc": AdaptWhileCommunicating,
        "adapt_then_combine": AdaptThenCombine,
        "atc": AdaptThenCombine,
        "asynchronous": Asynchronous,
        "decentlam": DecentLaM,
        "desloc": DESLOC,
        "diloco": DiLoCo,
        "exact_diffusion": ExactDiffusion,
        "extra": Extra,
        "factored_gossip": FactoredGossip,
        "gasloc": GASLoC,
        "gossip_pga": GossipPGA,
        "gradient_tracking": GradientTracking,
        "integral_correction": IntegralCorrection,
        "momentum_exchange": MomentumExchange,
        "momentum_tracking": MomentumTracking,
        "noloco": NoLoCo,
        "push_sum": PushSum,
        "quasi_global_integral": QuasiGlobalIntegral,
        "quasi_global_momentum": QuasiGlobalMomentum,
        "relay_sum": RelaySum,
        "slowmo": SlowMo,
        "sparse_loco": SparseLoCo,
        "streaming_diloco": StreamingDiLoCo,
    },
)
"""With their default constants; ``@gossip.ALGORITHMS.register(name)`` adds a class of your own."""


def resolve_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Return ``algorithm`` itself, or the algorithm of that name with its default constants."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name or a gossip.Algorithm, got {algorithm!r}; pass e.g. AdaptThenCombine()"
        )
    return ALGORITHMS.get(algorithm)()

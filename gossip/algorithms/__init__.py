"""Update rules: when and how a rank combines its values with what it received, and what state it keeps."""

from gossip.algorithms.adam_tracking import AdamTracking as AdamTracking
from gossip.algorithms.adapt_then_combine import AdaptThenCombine as AdaptThenCombine
from gossip.algorithms.adapt_while_communicating import AdaptWhileCommunicating as AdaptWhileCommunicating
from gossip.algorithms.algorithm_names import ALGORITHMS as ALGORITHMS
from gossip.algorithms.algorithm_names import resolve_algorithm as resolve_algorithm
from gossip.algorithms.asynchronous import Asynchronous as Asynchronous
from gossip.algorithms.asynchronous import Average as Average
from gossip.algorithms.asynchronous import Recording as Recording
from gossip.algorithms.base import VALUES as VALUES
from gossip.algorithms.base import Algorithm as Algorithm
from gossip.algorithms.base import Kept as Kept
from gossip.algorithms.base import Requires as Requires
from gossip.algorithms.bucket_view import Arrived as Arrived
from gossip.algorithms.bucket_view import BucketView as BucketView
from gossip.algorithms.decentlam import DecentLaM as DecentLaM
from gossip.algorithms.diloco import DiLoCo as DiLoCo
from gossip.algorithms.exact_diffusion import ExactDiffusion as ExactDiffusion
from gossip.algorithms.extra import Extra as Extra
from gossip.algorithms.gossip_pga import GossipPGA as GossipPGA
from gossip.algorithms.gradient_tracking import GradientTracking as GradientTracking
from gossip.algorithms.integral_correction import IntegralCorrection as IntegralCorrection
from gossip.algorithms.momentum_exchange import MomentumExchange as MomentumExchange
from gossip.algorithms.momentum_tracking import MomentumTracking as MomentumTracking
from gossip.algorithms.noloco import NoLoCo as NoLoCo
from gossip.algorithms.push_sum import PushSum as PushSum
from gossip.algorithms.quasi_global_integral import QuasiGlobalIntegral as QuasiGlobalIntegral
from gossip.algorithms.quasi_global_momentum import QuasiGlobalMomentum as QuasiGlobalMomentum
from gossip.algorithms.relay_sum import RelaySum as RelaySum
from gossip.algorithms.slowmo import SlowMo as SlowMo
from gossip.algorithms.sparse_loco import SparseLoCo as SparseLoCo
from gossip.algorithms.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo

__all__ = [
    "ALGORITHMS",
    "VALUES",
    "AdamTracking",
    "AdaptThenCombine",
    "AdaptWhileCommunicating",
    "Algorithm",
    "Arrived",
    "Asynchronous",
    "Average",
    "BucketView",
    "DecentLaM",
    "DiLoCo",
    "ExactDiffusion",
    "Extra",
    "GossipPGA",
    "GradientTracking",
    "IntegralCorrection",
    "Kept",
    "MomentumExchange",
    "MomentumTracking",
    "NoLoCo",
    "PushSum",
    "QuasiGlobalIntegral",
    "QuasiGlobalMomentum",
    "Recording",
    "RelaySum",
    "Requires",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
    "resolve_algorithm",
]

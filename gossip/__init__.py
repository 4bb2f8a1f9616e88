"""Decentralized ("gossip") data-parallel training for PyTorch.

Every rank trains its own replica and, after each step, averages it with a few peers chosen by a topology.
:class:`GossipDataParallel` takes the place of ``torch.nn.parallel.DistributedDataParallel``; :func:`launch` starts
workers on this machine.
"""

# ruff: noqa: E402

import gossip_training

gossip_training.check_files("gossip")  # before any file of a package of the same name is imported

from gossip.algorithms import ALGORITHMS as ALGORITHMS
from gossip.algorithms import AdamTracking as AdamTracking
from gossip.algorithms import AdaptThenCombine as AdaptThenCombine
from gossip.algorithms import AdaptWhileCommunicating as AdaptWhileCommunicating
from gossip.algorithms import Algorithm as Algorithm
from gossip.algorithms import Arrived as Arrived
from gossip.algorithms import Asynchronous as Asynchronous
from gossip.algorithms import Average as Average
from gossip.algorithms import BucketView as BucketView
from gossip.algorithms import DecentLaM as DecentLaM
from gossip.algorithms import DiLoCo as DiLoCo
from gossip.algorithms import ExactDiffusion as ExactDiffusion
from gossip.algorithms import Extra as Extra
from gossip.algorithms import GossipPGA as GossipPGA
from gossip.algorithms import GradientTracking as GradientTracking
from gossip.algorithms import IntegralCorrection as IntegralCorrection
from gossip.algorithms import Kept as Kept
from gossip.algorithms import MomentumExchange as MomentumExchange
from gossip.algorithms import MomentumTracking as MomentumTracking
from gossip.algorithms import NoLoCo as NoLoCo
from gossip.algorithms import PushSum as PushSum
from gossip.algorithms import QuasiGlobalIntegral as QuasiGlobalIntegral
from gossip.algorithms import QuasiGlobalMomentum as QuasiGlobalMomentum
from gossip.algorithms import Recording as Recording
from gossip.algorithms import RelaySum as RelaySum
from gossip.algorithms import Requires as Requires
from gossip.algorithms import SlowMo as SlowMo
from gossip.algorithms import SparseLoCo as SparseLoCo
from gossip.algorithms import StreamingDiLoCo as StreamingDiLoCo
from gossip.checkpoints import Checkpoint as Checkpoint
from gossip.checkpoints import export as export
from gossip.checkpoints import load as load
from gossip.checkpoints import save as save
from gossip.communication.world import World as World
from gossip.compression.choco import Choco as Choco
from gossip.compression.codec import BucketShape as BucketShape
from gossip.compression.codec import Codec as Codec
from gossip.compression.codec import Compression as Compression
from gossip.compression.compression_names import COMPRESSIONS as COMPRESSIONS
from gossip.compression.conversation import Arrival as Arrival
from gossip.compression.conversation import Conversation as Conversation
from gossip.compression.conversation import Delivery as Delivery
from gossip.compression.conversation import Turn as Turn
from gossip.compression.conversation import Turns as Turns
from gossip.compression.modulo import ModuloQuantization as ModuloQuantization
from gossip.compression.powergossip import PowerGossip as PowerGossip
from gossip.compression.value_codecs import Cast as Cast
from gossip.compression.value_codecs import Uncompressed as Uncompressed
from gossip.errors import CheckpointError as CheckpointError
from gossip.errors import ExchangeError as ExchangeError
from gossip.errors import GossipError as GossipError
from gossip.errors import LaunchError as LaunchError
from gossip.errors import ManifestError as ManifestError
from gossip.exchange.debug_transport import DebugTransport as DebugTransport
from gossip.exchange.distributed_transport import DistributedTransport as DistributedTransport
from gossip.exchange.exchanges import UsesExchange as UsesExchange
from gossip.exchange.transport import Exchange as Exchange
from gossip.exchange.transport import Transport as Transport
from gossip.exchange.transport_names import TRANSPORTS as TRANSPORTS
from gossip.launching.joining import join_training as join_training
from gossip.launching.launcher import launch as launch
from gossip.measuring.step_stats import StepStats as StepStats
from gossip.optimizers.accum_adam import AccumAdam as AccumAdam
from gossip.optimizers.accum_adam import AccumAdamW as AccumAdamW
from gossip.sharding.shard_mesh import make_shard_mesh as make_shard_mesh
from gossip.simulation import Cluster as Cluster
from gossip.simulation import DropOut as DropOut
from gossip.simulation import RandomDelays as RandomDelays
from gossip.simulation import SimulatedRun as SimulatedRun
from gossip.simulation import SlowRank as SlowRank
from gossip.simulation import Workload as Workload
from gossip.simulation import simulate_averages as simulate_averages
from gossip.simulation import simulate_time as simulate_time
from gossip.version import __version__ as __version__
from gossip.virtual import VirtualWorkers as VirtualWorkers
from gossip.wrapper import GossipDataParallel as GossipDataParallel

__all__ = [
    "ALGORITHMS",
    "COMPRESSIONS",
    "TRANSPORTS",
    "AccumAdam",
    "AccumAdamW",
    "AdamTracking",
    "AdaptThenCombine",
    "AdaptWhileCommunicating",
    "Algorithm",
    "Arrival",
    "Arrived",
    "Asynchronous",
    "Average",
    "BucketShape",
    "BucketView",
    "Cast",
    "Checkpoint",
    "CheckpointError",
    "Choco",
    "Cluster",
    "Codec",
    "Compression",
    "Conversation",
    "DebugTransport",
    "DecentLaM",
    "Delivery",
    "DiLoCo",
    "DistributedTransport",
    "DropOut",
    "ExactDiffusion",
    "Exchange",
    "ExchangeError",
    "Extra",
    "GossipDataParallel",
    "GossipError",
    "GossipPGA",
    "GradientTracking",
    "IntegralCorrection",
    "Kept",
    "LaunchError",
    "ManifestError",
    "ModuloQuantization",
    "MomentumExchange",
    "MomentumTracking",
    "NoLoCo",
    "PowerGossip",
    "PushSum",
    "QuasiGlobalIntegral",
    "QuasiGlobalMomentum",
    "RandomDelays",
    "Recording",
    "RelaySum",
    "Requires",
    "SimulatedRun",
    "SlowMo",
    "SlowRank",
    "SparseLoCo",
    "StepStats",
    "StreamingDiLoCo",
    "Transport",
    "Turn",
    "Turns",
    "Uncompressed",
    "UsesExchange",
    "VirtualWorkers",
    "Workload",
    "World",
    "__version__",
    "export",
    "join_training",
    "launch",
    "load",
    "make_shard_mesh",
    "save",
    "simulate_averages",
    "simulate_time",
]

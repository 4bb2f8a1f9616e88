"""Decentralized ("gossip") data-parallel training for PyTorch.

Every rank trains its own replica and, after each step, averages it with a few peers chosen by a topology.
:class:`GossipDataParallel` takes the place of ``torch.nn.parallel.DistributedDataParallel``; :func:`launch` starts
workers on this machine.
"""

# ruff: noqa: E402

import gossip_training

gossip_training.check_files("gossip")  # before any file of a package of the same name is imported

from gossip import algorithms as algorithms
from gossip.algorithms import *  # noqa: F403
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
    "COMPRESSIONS",
    "TRANSPORTS",
    "AccumAdam",
    "AccumAdamW",
    "Arrival",
    "BucketShape",
    "Cast",
    "Checkpoint",
    "CheckpointError",
    "Choco",
    "Cluster",
    "Codec",
    "Compression",
    "Conversation",
    "DebugTransport",
    "Delivery",
    "DistributedTransport",
    "DropOut",
    "Exchange",
    "ExchangeError",
    "GossipDataParallel",
    "GossipError",
    "LaunchError",
    "ManifestError",
    "ModuloQuantization",
    "PowerGossip",
    "RandomDelays",
    "SimulatedRun",
    "SlowRank",
    "StepStats",
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
__all__ += algorithms.__all__

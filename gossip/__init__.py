"""Decentralized ("gossip") data-parallel training for PyTorch.

Every rank trains its own replica and, after each step, averages it with a few peers chosen by a topology.
:class:`GossipDataParallel` takes the place of ``torch.nn.parallel.DistributedDataParallel``; :func:`launch` starts
workers on this machine.
"""

# ruff: noqa: E402

import gossip_training

gossip_training.check_files("gossip")  # before any file of a package of the same name is imported

from gossip import algorithms, simulation
from gossip.algorithms import *  # noqa: F403
from gossip.checkpoints import Checkpoint, export, load, save
from gossip.communication.world import World
from gossip.compression.choco import Choco
from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.compression_names import COMPRESSIONS
from gossip.compression.conversation import Arrival, Conversation, Delivery, Turn, Turns
from gossip.compression.modulo import ModuloQuantization
from gossip.compression.powergossip import PowerGossip
from gossip.compression.value_codecs import Cast, Uncompressed
from gossip.errors import CheckpointError, ExchangeError, GossipError, LaunchError, ManifestError
from gossip.exchange.debug_transport import DebugTransport
from gossip.exchange.distributed_transport import DistributedTransport
from gossip.exchange.exchanges import UsesExchange
from gossip.exchange.recording import Average, Recording
from gossip.exchange.transport import Exchange, Transport
from gossip.exchange.transport_names import TRANSPORTS
from gossip.launching.joining import join_training
from gossip.launching.launcher import launch
from gossip.measuring.step_stats import MemoryUse, StepStats
from gossip.optimizers.accum_adam import AccumAdam, AccumAdamW
from gossip.optimizers.muon_adamw import MuonAdamW
from gossip.sharding.shard_mesh import make_shard_mesh
from gossip.simulation import *  # noqa: F403
from gossip.virtual import VirtualWorkers
from gossip.wrapper import GossipDataParallel
from topologies.version import __version__

__all__ = [
    "COMPRESSIONS", "TRANSPORTS", "AccumAdam", "AccumAdamW", "Arrival", "Average", "BucketShape", "Cast", "Checkpoint",
    "CheckpointError", "Choco", "Codec", "Compression", "Conversation", "DebugTransport", "Delivery",
    "DistributedTransport", "Exchange", "ExchangeError", "GossipDataParallel", "GossipError", "LaunchError",
    "ManifestError", "MemoryUse", "ModuloQuantization", "MuonAdamW", "PowerGossip", "Recording", "StepStats",
    "Transport", "Turn", "Turns", "Uncompressed", "UsesExchange", "VirtualWorkers", "World", "__version__", "export",
    "join_training", "launch", "load", "make_shard_mesh", "save",
]  # fmt: skip
__all__ += algorithms.__all__
__all__ += simulation.__all__

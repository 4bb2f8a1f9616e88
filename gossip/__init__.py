"""Decentralized ("gossip") data-parallel training for PyTorch.

Every rank trains its own replica and, after each step, averages it with a few peers chosen by a topology.
:class:`GossipDataParallel` takes the place of ``torch.nn.parallel.DistributedDataParallel``; :func:`launch` starts
workers on this machine.
"""

from gossip.algorithms import AdaptWhileCommunicating as AdaptWhileCommunicating
from gossip.debug_transport import DebugTransport as DebugTransport
from gossip.engine import StepStats as StepStats
from gossip.errors import ExchangeError as ExchangeError
from gossip.errors import GossipError as GossipError
from gossip.errors import LaunchError as LaunchError
from gossip.errors import ManifestError as ManifestError
from gossip.launcher import launch as launch
from gossip.transports import DistributedTransport as DistributedTransport
from gossip.transports import Exchange as Exchange
from gossip.transports import Transport as Transport
from gossip.world import World as World
from gossip.wrapper import GossipDataParallel as GossipDataParallel

__all__ = [
    "AdaptWhileCommunicating",
    "DebugTransport",
    "DistributedTransport",
    "Exchange",
    "ExchangeError",
    "GossipDataParallel",
    "GossipError",
    "LaunchError",
    "ManifestError",
    "StepStats",
    "Transport",
    "World",
    "launch",
]
__version__ = "0.1.0"

"""Strategies for gossip training in the Trainer and Fabric, for ``pytorch_lightning`` and ``lightning_fabric``.

:mod:`gossip.integrations.lightning` has the same for the package ``lightning``, whose classes are distinct.

Importing this module registers both under the name "gossip".
"""

import pytorch_lightning
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from gossip.integrations.lightning_fabric_strategy import FabricStrategy
from gossip.integrations.lightning_fabric_strategy import replica as replica
from gossip.integrations.lightning_trainer import TrainerStrategy


class GossipStrategy(TrainerStrategy, DDPStrategy):
    """Gossip training in the Trainer, see :class:`gossip.integrations.lightning.GossipStrategy`."""

    library = pytorch_lightning


class GossipFabricStrategy(FabricStrategy, FabricDDPStrategy):
    """Gossip training in Fabric, see :class:`gossip.integrations.lightning.GossipFabricStrategy`."""


StrategyRegistry.register("gossip", GossipStrategy, description="Decentralized data parallelism by gossip")
STRATEGY_REGISTRY.register("gossip", GossipFabricStrategy, description="Decentralized data parallelism by gossip")

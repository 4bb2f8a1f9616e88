"""What can be saved, loaded and exported."""

from __future__ import annotations

from gossip.checkpoints.rank_replica import RankReplica
from gossip.checkpoints.replicas import Replicas
from gossip.checkpoints.virtual_replicas import VirtualReplicas
from gossip.virtual.workers import VirtualWorkers
from gossip.wrapper import GossipDataParallel

TrainedModel = GossipDataParallel | VirtualWorkers


def replicas_of(model: TrainedModel) -> Replicas:
    """The replicas that this process holds of what ``model`` trains.

    Raises
    ------
    TypeError
        It trains none.
    """
    if isinstance(model, GossipDataParallel):
        return RankReplica(model)
    if isinstance(model, VirtualWorkers):
        return VirtualReplicas(model)
    raise TypeError(
        f"model must be a GossipDataParallel or VirtualWorkers, got {type(model).__name__}; wrap the module first"
    )

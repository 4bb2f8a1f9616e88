"""The models that can be saved, loaded and exported."""

from collections.abc import Callable
from typing import TypeVar, cast

from gossip.checkpoints.rank_replica import RankReplica
from gossip.checkpoints.replicas import Replicas
from gossip.checkpoints.virtual_replicas import VirtualReplicas
from gossip.virtual.workers import VirtualWorkers
from gossip.wrapper import GossipDataParallel

_Result = TypeVar("_Result")
TrainedModel = GossipDataParallel | VirtualWorkers


def collectively(model: TrainedModel, operation: Callable[[Replicas], _Result]) -> _Result:
    """Run ``operation`` on the replicas here; if a rank is lost meanwhile, the remaining ranks may repeat it.

    Raises TypeError: ``model`` is neither a GossipDataParallel nor VirtualWorkers.
    """
    if isinstance(model, VirtualWorkers):
        return operation(VirtualReplicas(model))
    if not isinstance(model, GossipDataParallel):
        raise TypeError(
            f"model must be a GossipDataParallel or VirtualWorkers, got {type(model).__name__}; wrap the module first"
        )

    def operate() -> tuple[_Result | None, Exception | None]:
        replicas = RankReplica(model)
        try:
            return operation(replicas), None
        except Exception as error:
            if error is not replicas.failure:
                raise
            return None, error

    result, failure = model._collectively(operate)
    if failure is not None:
        raise failure
    return cast(_Result, result)

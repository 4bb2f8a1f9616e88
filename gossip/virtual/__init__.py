"""All replicas of a run in one process, stacked: for studies of topologies, and as the oracle of distributed runs."""

from gossip.virtual.workers import VirtualWorkers as VirtualWorkers

__all__ = ["VirtualWorkers"]

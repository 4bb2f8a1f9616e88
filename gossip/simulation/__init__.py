"""Simulation of how long a run takes on a cluster that is only described, with all-reduce and every topology."""

from gossip.simulation.cluster import Cluster
from gossip.simulation.goodput import Failures, SimulatedGoodput, simulate_goodput
from gossip.simulation.placement import placement
from gossip.simulation.simulate import SimulatedRun, simulate_time
from gossip.simulation.workload import RandomDelays, SlowRank, Workload

__all__ = [
    "Cluster", "Failures", "RandomDelays", "SimulatedGoodput", "SimulatedRun", "SlowRank", "Workload",
    "placement", "simulate_goodput", "simulate_time",
]  # fmt: skip

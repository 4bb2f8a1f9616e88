"""Simulation of how long a run takes on a cluster that is only described, with all-reduce and every topology."""

from gossip.simulation.cluster import Cluster as Cluster
from gossip.simulation.goodput import Failures as Failures
from gossip.simulation.goodput import SimulatedGoodput as SimulatedGoodput
from gossip.simulation.goodput import simulate_goodput as simulate_goodput
from gossip.simulation.simulate import SimulatedRun as SimulatedRun
from gossip.simulation.simulate import simulate_time as simulate_time
from gossip.simulation.workload import RandomDelays as RandomDelays
from gossip.simulation.workload import SlowRank as SlowRank
from gossip.simulation.workload import Workload as Workload

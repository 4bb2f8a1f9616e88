"""Measurement of a cluster's compute per step, jitter, latency and bandwidth, and advice that follows from them."""

from gossip.lab.probe.cluster_measuring import Measured as Measured
from gossip.lab.probe.cluster_measuring import measure as measure
from gossip.lab.probe.probe_advice import advise as advise

__all__ = ["Measured", "advise", "measure"]

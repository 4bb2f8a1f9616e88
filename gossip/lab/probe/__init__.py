"""Measurement of a cluster's compute per step, jitter, latency and bandwidth, and advice that follows from them."""

from gossip.lab.probe.cluster_measuring import Measured as Measured
from gossip.lab.probe.cluster_measuring import measure as measure
from gossip.lab.probe.probe_advice import Advice as Advice
from gossip.lab.probe.probe_advice import advise as advise
from gossip.lab.probe.probe_choice import DATA_KINDS as DATA_KINDS
from gossip.lab.probe.probe_choice import Choice as Choice
from gossip.lab.probe.probe_choice import DataKind as DataKind

__all__ = ["DATA_KINDS", "Advice", "Choice", "DataKind", "Measured", "advise", "measure"]

"""What a cluster is really like: compute per step, jitter, latency and bandwidth, and what follows from them."""

from gossip.probing.advice import Advice as Advice
from gossip.probing.advice import advise as advise
from gossip.probing.measuring import Measured as Measured
from gossip.probing.measuring import measure as measure

__all__ = ["Advice", "Measured", "advise", "measure"]

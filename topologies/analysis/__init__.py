"""What can be computed of a topology: how fast it mixes, when it is exact, whom it joins and what it sends.

>>> import topologies
>>> from topologies import analysis
>>> ring = topologies.build("ring", 8)
>>> analysis.rounds_to(ring, 0.01), analysis.diameter(ring), analysis.traffic(ring).bytes_per_rank
(22, 4, 2.0)
"""

from topologies.analysis.connectivity import Degrees, connected, degrees, diameter
from topologies.analysis.consensus import (
    beta,
    bias,
    consensus_errors,
    consensus_rate,
    product,
    rounds_to,
    slem,
    spectral_gap,
)
from topologies.analysis.exactness import Sums, exact_after, sums
from topologies.analysis.traffic import RoundTraffic, Traffic, rate_per_byte, round_traffic, traffic

__all__ = [
    "Degrees", "RoundTraffic", "Sums", "Traffic", "beta", "bias", "connected", "consensus_errors", "consensus_rate",
    "degrees", "diameter", "exact_after", "product", "rate_per_byte", "round_traffic", "rounds_to", "slem",
    "spectral_gap", "sums", "traffic",
]  # fmt: skip

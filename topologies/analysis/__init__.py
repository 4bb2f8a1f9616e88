"""What can be computed of a topology: how fast it mixes, when it is exact, whom it joins and what it sends.

>>> import topologies
>>> from topologies import analysis
>>> ring = topologies.build("ring", 8)
>>> analysis.rounds_to(ring, 0.01), analysis.diameter(ring), analysis.traffic(ring).bytes_per_rank
(22, 4, 2.0)
"""

from topologies.analysis.connectivity import Degrees as Degrees
from topologies.analysis.connectivity import connected as connected
from topologies.analysis.connectivity import degrees as degrees
from topologies.analysis.connectivity import diameter as diameter
from topologies.analysis.consensus import beta as beta
from topologies.analysis.consensus import bias as bias
from topologies.analysis.consensus import consensus_errors as consensus_errors
from topologies.analysis.consensus import consensus_rate as consensus_rate
from topologies.analysis.consensus import product as product
from topologies.analysis.consensus import rounds_to as rounds_to
from topologies.analysis.consensus import slem as slem
from topologies.analysis.consensus import spectral_gap as spectral_gap
from topologies.analysis.exactness import Sums as Sums
from topologies.analysis.exactness import exact_after as exact_after
from topologies.analysis.exactness import sums as sums
from topologies.analysis.traffic import RoundTraffic as RoundTraffic
from topologies.analysis.traffic import Traffic as Traffic
from topologies.analysis.traffic import rate_per_byte as rate_per_byte
from topologies.analysis.traffic import round_traffic as round_traffic
from topologies.analysis.traffic import traffic as traffic

__all__ = [
    "Degrees",
    "RoundTraffic",
    "Sums",
    "Traffic",
    "beta",
    "bias",
    "connected",
    "consensus_errors",
    "consensus_rate",
    "degrees",
    "diameter",
    "exact_after",
    "product",
    "rate_per_byte",
    "round_traffic",
    "rounds_to",
    "slem",
    "spectral_gap",
    "sums",
    "traffic",
]

"""Communication topologies for decentralized learning.

>>> import topologies
>>> topology = topologies.build("one_peer_exponential", 8)
>>> topology.round(1).neighbours(0)
{2: 0.5}
"""

from topologies import analysis as analysis
from topologies import families as families
from topologies.comparing import Comparison as Comparison
from topologies.comparing import compare as compare
from topologies.describe import Description as Description
from topologies.drawing import draw as draw
from topologies.facts import Facts as Facts
from topologies.facts import facts_of as facts_of
from topologies.phases import Phase as Phase
from topologies.recommending import Recommendation as Recommendation
from topologies.recommending import recommend as recommend
from topologies.registry import available as available
from topologies.registry import build as build
from topologies.registry import family as family
from topologies.registry import register as register
from topologies.registry import variants as variants
from topologies.round import Round as Round
from topologies.topology import Topology as Topology
from topologies.validation import Stochasticity as Stochasticity
from topologies.weights import weighted_round as weighted_round

__all__ = [
    "Comparison",
    "Description",
    "Facts",
    "Phase",
    "Recommendation",
    "Round",
    "Stochasticity",
    "Topology",
    "analysis",
    "available",
    "build",
    "compare",
    "draw",
    "facts_of",
    "families",
    "family",
    "recommend",
    "register",
    "variants",
    "weighted_round",
]

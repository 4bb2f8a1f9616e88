"""Communication topologies for decentralized learning.

>>> import topologies
>>> topology = topologies.build("one_peer_exponential", 8)
>>> topology.round(1).neighbours(0)
{2: 0.5}
"""

from topologies import analysis as analysis
from topologies import families as families
from topologies.analysis.description import Description as Description
from topologies.drawing import draw as draw
from topologies.drawing import draw_comparison as draw_comparison
from topologies.family_registry import available as available
from topologies.family_registry import family as family
from topologies.family_registry import register as register
from topologies.graphs.edge_weights import weighted_round as weighted_round
from topologies.reports.comparing import Comparison as Comparison
from topologies.reports.comparing import compare as compare
from topologies.reports.docstring_facts import Facts as Facts
from topologies.reports.docstring_facts import facts_of as facts_of
from topologies.reports.recommending import Recommendation as Recommendation
from topologies.reports.recommending import recommend as recommend
from topologies.round import Round as Round
from topologies.schedule import Phase as Phase
from topologies.schedule import Schedule as Schedule
from topologies.topology import Topology as Topology
from topologies.topology import build as build
from topologies.topology import variants as variants
from topologies.validation import Stochasticity as Stochasticity

__all__ = [
    "Comparison",
    "Description",
    "Facts",
    "Phase",
    "Recommendation",
    "Round",
    "Schedule",
    "Stochasticity",
    "Topology",
    "analysis",
    "available",
    "build",
    "compare",
    "draw",
    "draw_comparison",
    "facts_of",
    "families",
    "family",
    "recommend",
    "register",
    "variants",
    "weighted_round",
]

"""Communication topologies for decentralized learning.

>>> import topologies
>>> topology = topologies.build("one_peer_exponential", 8)
>>> topology.round(1).neighbours(0)
{2: 0.5}

The examples of its modules, too, begin after ``import topologies``.
"""

from topologies import analysis, families
from topologies.analysis.description import Description
from topologies.drawing import draw, draw_comparison
from topologies.graphs.edge_weights import weighted_round
from topologies.reports.comparing import Comparison, compare
from topologies.reports.family_samples import Facts, facts_of
from topologies.reports.recommending import Recommendation, recommend
from topologies.round import Round
from topologies.schedule import Phase, Schedule
from topologies.topology import Topology, available, build, family, register, variants
from topologies.validation import Stochasticity
from topologies.version import __version__

__all__ = [
    "Comparison", "Description", "Facts", "Phase", "Recommendation", "Round", "Schedule", "Stochasticity", "Topology",
    "__version__", "analysis", "available", "build", "compare", "draw", "draw_comparison", "facts_of", "families",
    "family", "recommend", "register", "variants", "weighted_round",
]  # fmt: skip

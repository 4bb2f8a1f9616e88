"""Social networks that were observed among people, used as benchmarks by papers on decentralized learning.

The edges count, how often people met does not: weights in the data are ignored.
"""

import networkx as nx

from topologies.families.given_graph import weighted_topology
from topologies.graphs.graph_files import clean_graph
from topologies.topology import Family, Topology, register

_DOCSTRING = """{summary}; Metropolis weights.

{definition}

Properties
----------
sizes : {size}
degree : {degree}
period : 1
exact : never
rate : SLEM {slem}
weights : 1/(1 + max(d_i, d_j)), symmetric

Parameters
----------
weights
    A scheme of the family "graph".

References
----------
{source}

Examples
--------
>>> import networkx, topologies
>>> people = sorted(networkx.{data}())
>>> [people[rank] for rank in topologies.build("{name}", {size}).round(0).peers({rank})]
{peers}
"""


def _social(name: str, size: int, data: str, **described: object) -> Family:
    """Return the family of one graph of networkx, documented; the example shows the ``peers`` of one ``rank``."""

    def family(world_size: int, *, weights: str = "metropolis") -> Topology:
        if world_size != size:
            raise ValueError(
                f"topology {name!r} is one graph of {size} nodes, got world_size {world_size}; use world_size {size}, "
                f"or a family for any size, such as watts_strogatz"
            )
        # The edges alone: nothing that is ignored causes a warning.
        graph = clean_graph(nx.Graph(getattr(nx, data)().edges))
        return weighted_topology(world_size, list(graph.edges), weights)

    family.__name__ = family.__qualname__ = name
    family.__doc__ = _DOCSTRING.format(name=name, size=size, data=data, **described)
    return register(name)(family)


karate_club = _social(
    "karate_club",
    34,
    "karate_club_graph",
    summary="The 34 members of a karate club, joined if they were friends",
    definition="Rank r is member r of ``networkx.karate_club_graph()``: 0 is the instructor, 33 the administrator.",
    degree="at most 17, 4.6 on average",
    slem="0.9688",
    source='Zachary, "An information flow model for conflict and fission in small groups", 1977.',
    rank=9,
    peers=[2, 33],
)
davis = _social(
    "davis",
    32,
    "davis_southern_women_graph",
    summary="18 women of a southern town and the 14 social events that they attended",
    definition="Bipartite: a woman is joined to her events. Rank r is "
    "``sorted(networkx.davis_southern_women_graph())[r]``, a name or one of E1, E10, .. E14, E2, .. E9.",
    degree="at most 14, 5.6 on average",
    slem="0.9179",
    source='Davis, Gardner and Gardner, "Deep South", 1941.',
    rank=19,
    peers=["E11", "E9"],
)
florentine = _social(
    "florentine",
    15,
    "florentine_families_graph",
    summary="15 families of Florence around 1430, joined if a marriage joined them",
    definition="Rank r is the family ``sorted(networkx.florentine_families_graph())[r]``; the Medici are rank 8.",
    degree="at most 6, 2.7 on average",
    slem="0.9426",
    source='Breiger and Pattison, "Cumulated social roles: the duality of persons and their algebras", 1986.',
    rank=8,
    peers=["Acciaiuoli", "Albizzi", "Barbadori", "Ridolfi", "Salviati", "Tornabuoni"],
)
les_miserables = _social(
    "les_miserables",
    77,
    "les_miserables_graph",
    summary="The 77 characters of the novel, joined if they appear in the same chapter",
    definition="Rank r is the character ``sorted(networkx.les_miserables_graph())[r]``.",
    degree="at most 36, 6.6 on average",
    slem="0.9927",
    source='Knuth, "The Stanford GraphBase", 1993.',
    rank=68,
    peers=["Valjean"],
)

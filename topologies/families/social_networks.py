"""Social networks that were observed among people, used as benchmarks by papers on decentralized learning.

The edges count, how often people met does not: weights in the data are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from topologies.families.given_graph import weighted_topology
from topologies.family_registry import register
from topologies.graphs.graph_files import clean_graph
from topologies.topology import Topology


@register("karate_club")
def karate_club(world_size: int, *, weights: str = "metropolis") -> Topology:
    """The 34 members of a karate club, joined if they were friends; Metropolis weights.

    Rank r is member r of ``networkx.karate_club_graph()``: 0 is the instructor, 33 the administrator.

    Properties
    ----------
    sizes : 34
    degree : at most 17, 4.6 on average
    period : 1
    exact : never
    rate : SLEM 0.9688
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph".

    References
    ----------
    Zachary, "An information flow model for conflict and fission in small groups", 1977.

    Examples
    --------
    >>> import topologies
    >>> topologies.build("karate_club", 34).round(0).peers(33)[:4]
    (8, 9, 13, 14)
    """
    return _social("karate_club", world_size, nx.karate_club_graph, weights)


@register("davis")
def davis(world_size: int, *, weights: str = "metropolis") -> Topology:
    """18 women of a southern town and the 14 social events that they attended; Metropolis weights.

    Bipartite: a woman is joined to her events. Rank r is ``sorted(networkx.davis_southern_women_graph())[r]``, a
    name or one of E1, E10, .. E14, E2, .. E9.

    Properties
    ----------
    sizes : 32
    degree : at most 14, 5.6 on average
    period : 1
    exact : never
    rate : SLEM 0.9179
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph".

    References
    ----------
    Davis, Gardner and Gardner, "Deep South", 1941.

    Examples
    --------
    >>> import networkx, topologies
    >>> people = sorted(networkx.davis_southern_women_graph())
    >>> round_ = topologies.build("davis", 32).round(0)
    >>> [people[rank] for rank in round_.peers(people.index("Flora Price"))]
    ['E11', 'E9']
    """
    return _social("davis", world_size, nx.davis_southern_women_graph, weights)


@register("florentine")
def florentine(world_size: int, *, weights: str = "metropolis") -> Topology:
    """15 families of Florence around 1430, joined if a marriage joined them; Metropolis weights.

    Rank r is the family ``sorted(networkx.florentine_families_graph())[r]``; the Medici are rank 8.

    Properties
    ----------
    sizes : 15
    degree : at most 6, 2.7 on average
    period : 1
    exact : never
    rate : SLEM 0.9426
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph".

    References
    ----------
    Breiger and Pattison, "Cumulated social roles: the duality of persons and their algebras", 1986.

    Examples
    --------
    >>> import networkx, topologies
    >>> families = sorted(networkx.florentine_families_graph())
    >>> [families[rank] for rank in topologies.build("florentine", 15).round(0).peers(8)]
    ['Acciaiuoli', 'Albizzi', 'Barbadori', 'Ridolfi', 'Salviati', 'Tornabuoni']
    """
    return _social("florentine", world_size, nx.florentine_families_graph, weights)


@register("les_miserables")
def les_miserables(world_size: int, *, weights: str = "metropolis") -> Topology:
    """The 77 characters of the novel, joined if they appear in the same chapter; Metropolis weights.

    Rank r is the character ``sorted(networkx.les_miserables_graph())[r]``.

    Properties
    ----------
    sizes : 77
    degree : at most 36, 6.6 on average
    period : 1
    exact : never
    rate : SLEM 0.9927
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    weights
        A scheme of the family "graph".

    References
    ----------
    Knuth, "The Stanford GraphBase", 1993.

    Examples
    --------
    >>> import networkx, topologies
    >>> people = sorted(networkx.les_miserables_graph())
    >>> [people[rank] for rank in topologies.build("les_miserables", 77).round(0).peers(people.index("Scaufflaire"))]
    ['Valjean']
    """
    return _social("les_miserables", world_size, nx.les_miserables_graph, weights)


def _social(name: str, world_size: int, load: Callable[[], nx.Graph], weights: str) -> Topology:
    graph = clean_graph(nx.Graph(load().edges))  # the edges alone: nothing that is ignored causes a warning
    if world_size != len(graph):
        raise ValueError(
            f"topology {name!r} is one graph of {len(graph)} nodes, got world_size {world_size}; use world_size "
            f"{len(graph)}, or a family for any size, such as watts_strogatz"
        )
    return weighted_topology(world_size, list(graph.edges), weights)

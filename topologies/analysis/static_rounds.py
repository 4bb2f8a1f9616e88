"""Which topologies exchange along the same edges, with the same weights, in every exchange."""

from __future__ import annotations

import networkx as nx

from topologies.round import Round
from topologies.schedule import Schedule


def check_static(topology: Schedule, needed_by: str, instead: str, *, symmetric: bool = False) -> None:
    """Refuse a topology whose exchanges differ from each other; local steps between them do not matter.

    Parameters
    ----------
    topology : Schedule
    needed_by : str
        What cannot do without: "compression choco", "algorithm ExactDiffusion".
    instead : str
        What to choose on such a topology.
    symmetric : bool
        Whether W must be symmetric too.

    Raises
    ------
    ValueError
        Says why, and what to choose.
    """
    fault = _why_not_static(topology)
    if fault is not None:
        raise ValueError(
            f"topology {topology.name!r} {fault}: {needed_by} builds on what the same peers sent in all "
            f"exchanges before; choose {instead}, or a static topology such as ring"
        )
    if symmetric and not only_exchange(topology).is_symmetric:
        raise ValueError(
            f"topology {topology.name!r} has edges of one direction, or of two weights: {needed_by} needs two "
            f"ranks that read each other with one weight; choose {instead}, or an undirected topology such as ring"
        )


def is_static_and_symmetric(topology: Schedule) -> bool:
    """Whether W is the same in every exchange, and W[i, j] = W[j, i]."""
    return _why_not_static(topology) is None and only_exchange(topology).is_symmetric


def is_exact_in_every_round(topology: Schedule) -> bool:
    """Whether W[i, j] = 1/n in every exchange; without a period that cannot be known."""
    return _why_not_static(topology) is None and only_exchange(topology).uniform_groups == (
        tuple(range(topology.world_size)),
    )


def only_graph(topology: Schedule) -> nx.Graph:
    """Return the graph of a topology that is static, undirected and without loops."""
    graph = only_exchange(topology).graph.to_undirected()
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def _why_not_static(topology: Schedule) -> str | None:
    if topology.world_size == 1:
        return None
    found: Round | None = None
    for phase in topology.phases:
        if phase.topology.period is None:
            return "never repeats its rounds"
        for exchange in range(phase.num_distinct(sampled=0)):
            other = phase.topology.round(exchange)
            if other.is_identity:
                continue
            if found is not None and other != found:
                return "mixes by another matrix from one exchange to the next"
            found = other
    return None


def only_exchange(topology: Schedule) -> Round:
    """Return the one exchange of a static topology, or a round without an exchange if it has none."""
    exchanges = (
        phase.topology.round(exchange) for phase in topology.phases for exchange in range(phase.num_distinct(sampled=0))
    )
    first = topology.round(0)
    return next((round_ for round_ in exchanges if not round_.is_identity), first)

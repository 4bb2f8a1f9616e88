"""Which topologies exchange along the same edges, with the same weights, in every exchange."""

from collections.abc import Iterator

import networkx as nx

from topologies.round import Round
from topologies.schedule import Schedule


def check_static(topology: Schedule, needed_by: str, instead: str, *, symmetric: bool = False) -> None:
    """Refuse a topology whose exchanges differ from each other; local steps between them do not matter.

    ``needed_by`` is what cannot do without, such as "compression choco", and ``instead`` what to choose on such a
    topology. With ``symmetric`` W must be symmetric too.
    """
    if (fault := _why_not_static(topology)) is not None:
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


def only_exchange(topology: Schedule) -> Round:
    """Return the one exchange of a static topology, or a round without an exchange if it has none."""
    return next(_exchanges(topology), topology.round(0))


def _why_not_static(topology: Schedule) -> str | None:
    if any(phase.topology.period is None for phase in topology.phases) and topology.world_size > 1:
        return "never repeats its rounds"
    found = only_exchange(topology)
    if any(round_ != found for round_ in _exchanges(topology)):
        return "mixes by another matrix from one exchange to the next"
    return None


def _exchanges(topology: Schedule) -> Iterator[Round]:
    for phase in topology.phases:
        rounds = map(phase.topology.round, range(phase.num_distinct(sampled=0)))
        yield from (round_ for round_ in rounds if not round_.is_identity)

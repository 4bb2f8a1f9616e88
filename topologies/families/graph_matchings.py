"""Families that split any graph into matchings: in turn, or each at random (MATCHA)."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from topologies.graphs.edge_colouring import edge_colouring
from topologies.graphs.graph_files import GraphSource, clean_graph, read_graph
from topologies.graphs.matching_activation import Activation, activation
from topologies.matrix_storage import IntArray
from topologies.round import Round
from topologies.topology import Topology, available, build, register
from topologies.validation import check_integer, check_real, check_stored

_GRAPHS = ("ring", "torus")

#: Most edges of a graph that are coloured in a few seconds; it has nearly as many as ranks.
_MOST_COLOURED = 300_000


@register("matchings", variants=lambda *_: [{"graph": graph} for graph in _GRAPHS])
def matchings(world_size: int, *, graph: GraphSource) -> Topology:
    """The matchings of a graph's edge colouring in turn: every edge is used once per period, with weight 1/2.

    The edges of the graph are split into m matchings M_0 .. M_(m-1), see
    :func:`topologies.graphs.edge_colouring.edge_colouring`. In round t the two ranks of every pair in M_(t mod m)
    average; the others keep what they have.

    Properties
    ----------
    sizes : any n with a connected graph
    degree : 1
    period : number of matchings m; d <= m <= d + 1 for largest degree d, m = d if bipartite
    exact : never promised; the hypercube is exact after a period
    rate : beta of a period, measured; below 1 on every connected graph
    weights : 1/2, symmetric, doubly stochastic, uniform groups

    Parameters
    ----------
    graph
        The name of a family that repeats one symmetric round, such as "ring" or "torus"; a networkx graph, its
        node-link data, or a file: GraphML, GEXF, edge list or node-link JSON, by suffix. A graph is recorded in the
        options, so the topology no longer needs the file.

    References
    ----------
    Boyd, Ghosh, Prabhakar and Shah, "Randomized gossip algorithms", 2006 (the same pairs, at random).
    Misra and Gries, "A constructive proof of Vizing's theorem", 1992.

    Examples
    --------
    >>> topology = topologies.build("matchings", 5, graph="ring")
    >>> [topology.round(t).groups for t in range(topology.period)]
    [((0, 1), (2, 3), (4,)), ((0, 4), (1, 2), (3,)), ((0,), (1,), (2,), (3, 4))]
    """
    edges, recorded = _edges("matchings", world_size, graph)
    colours = edge_colouring(edges)
    return Topology(
        world_size,
        lambda t: Round.from_groups(world_size, colours[t].tolist()),
        len(colours),
        promised_symmetric=True,
        options={"graph": recorded},
    )


@register("matcha", variants=lambda *_: [{"graph": graph} for graph in _GRAPHS])
def matcha(world_size: int, *, graph: GraphSource, budget: float = 0.5, seed: int = 0) -> Topology:
    """Each matching of a graph is used with its own probability, so that few rounds mix like the whole graph.

    The edges of the graph are split into m matchings with Laplacians L_j. In round t matching j is used (B_j = 1) with
    probability p_j, and ``W = I - alpha sum_j B_j L_j``. The probabilities maximise ``lambda_2(L)``, ``L = sum_j p_j
    L_j``, subject to ``sum_j p_j <= budget * m``. The step alpha minimises ``||E[W^T W] - J||_2 = ||I - 2 alpha L +
    alpha^2 (L^2 + 2 L~) - J||_2`` with ``L~ = sum_j p_j (1 - p_j) L_j``. Both are computed at the first round;
    ``topology.make_round.activation`` holds them.

    What a rank keeps, 1 - alpha (number of its pairs in use), is negative where many matchings are used at once: alpha
    is the best for the mean square, not for the largest draw. A round without any matching is the identity.

    Properties
    ----------
    sizes : any n with a connected graph
    degree : at most the largest degree of the graph; budget times it, about, on average
    period : none (random); 1 for budget=1, which always uses the whole graph
    exact : never promised; budget=1 on the complete graph is exact after 1 round
    rate : sqrt(||E[W^T W] - J||), ``activation.rate``; the paper prints its square
    weights : alpha, symmetric, doubly stochastic; what a rank keeps can be negative

    Parameters
    ----------
    graph
        As in :func:`matchings`.
    budget
        The share of the matchings used per round on average; above 0, at most 1.
    seed
        At least 0; the matchings of round t follow from (seed, t).

    References
    ----------
    Wang, Sahu, Yang, Joshi and Kar, "MATCHA: Speeding up decentralized SGD via matching decomposition sampling", 2019,
    section 3, problems (4) and (5), Theorem 2.

    Examples
    --------
    >>> topology = topologies.build("matcha", 6, graph="complete", budget=0.5)
    >>> found = topology.make_round.activation
    >>> found.probabilities.tolist(), found.alpha
    ([0.5, 0.5, 0.5, 0.5, 0.5], 0.25)
    """
    budget = check_real("budget", budget, "above 0 and at most 1", example=0.5)
    seed = check_integer("seed", seed, minimum=0)
    edges, recorded = _edges("matcha", world_size, graph)
    sampled = SampledMatchings(world_size, tuple(edge_colouring(edges)), budget, seed)
    return Topology(
        world_size,
        sampled,
        1 if budget == 1 else None,
        promised_symmetric=True,
        options={"graph": recorded, "budget": budget},
    )


def _edges(family: str, world_size: int, graph: GraphSource) -> tuple[IntArray, str | dict[str, Any]]:
    """Return the edges of a connected graph on n ranks, shape ``[edges, 2]``, and what to record as the option."""
    is_complete = isinstance(graph, str) and graph == "complete"
    fewest = world_size * (world_size - 1) / 2.0 if is_complete else world_size - 1.0
    check_stored(family, world_size, fewest, most=_MOST_COLOURED, advice="or a graph with fewer edges")
    recorded: str | dict[str, Any]
    if isinstance(graph, str) and not Path(graph).suffix:
        pairs, recorded = _pairs_of_family(world_size, graph), graph
    else:
        cleaned = clean_graph(read_graph(graph), world_size=world_size)
        pairs, recorded = list(cleaned.edges), nx.node_link_data(cleaned, edges="edges")
    check_stored(family, world_size, len(pairs), most=_MOST_COLOURED, advice="or a graph with fewer edges")
    return np.array(pairs, dtype=np.int64).reshape(-1, 2), recorded


def _pairs_of_family(world_size: int, name: str) -> list[tuple[int, int]]:
    instead = "pass the name of a family of one undirected graph, such as 'ring', a path, or a networkx graph"
    if name not in available():
        raise ValueError(f"graph={name!r} is no registered family, and no file without a suffix; {instead}")
    try:
        topology = build(name, world_size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"graph={name!r} names a family that cannot be used here: {error}; {instead}") from error
    round_ = topology.round(0)
    if topology.period != 1 or not round_.is_symmetric or len(round_.groups) > 1:
        raise ValueError(
            f"graph={name!r} names a family that does not repeat one symmetric round that connects {world_size} ranks; "
            f"{instead}"
        )
    return [(rank, other) for rank in range(world_size) for other in round_.neighbours(rank) if other > rank]


@dataclass(frozen=True, eq=False)
class SampledMatchings:
    """Makes the rounds of :func:`matcha`; it is the ``make_round`` of the topology."""

    world_size: int
    matchings: tuple[IntArray, ...]
    budget: float
    seed: int

    @cached_property
    def activation(self) -> Activation:
        """Probabilities, step and rate; computed when first read."""
        return activation(self.world_size, self.matchings, self.budget)

    def __call__(self, t: int) -> Round:
        draws = np.random.default_rng((self.seed, t)).random(len(self.matchings))
        used = np.flatnonzero(draws < self.activation.probabilities)
        if not len(used):
            return Round.identity(self.world_size)
        one, other = np.concatenate([self.matchings[number] for number in used]).T
        return Round.from_edges(
            self.world_size, np.concatenate((one, other)), np.concatenate((other, one)), self.activation.alpha
        )

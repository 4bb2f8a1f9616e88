"""Families that draw one random graph from a seed and keep it forever."""

import functools
import math
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np

from topologies.families.given_graph import weighted_topology
from topologies.topology import Topology, register
from topologies.validation import check_integer, check_real, check_served, check_stored, listed

#: How many graphs are drawn in the hope of a connected one.
_MAX_ATTEMPTS = 100

#: Of large graphs fewer are drawn: the last one is the one that brings nodes and edges in all to this number.
_MOST_DRAWN_IN_ALL = 2 * 10**7

#: Most edges of a graph that networkx draws in a few seconds.
_MOST_DRAWN = 10**6


@register("random_regular")
def random_regular(
    world_size: int, *, degree: int | None = None, seed: int = 0, weights: str = "metropolis"
) -> Topology:
    """A random connected graph in which every rank has the same degree; 1/(degree + 1) for oneself and each of them.

    W = (I + A) / (d + 1) with A the adjacency matrix of a random d-regular graph, d = ``degree``, drawn again until
    it is connected. For d >= 3 almost every one is an expander: its gap stays away from 0 as n grows.

    Properties
    ----------
    sizes : above degree, with n * degree even
    degree : degree
    period : 1
    exact : never promised; after 1 round for degree n - 1
    rate : SLEM about (1 + 2 sqrt(degree - 1)) / (degree + 1) for large n
    weights : 1/(degree + 1), symmetric

    Parameters
    ----------
    degree
        By default 3, or 4 if n is odd; n - 1 for fewer ranks.
    seed
        At least 0; with n and the degree it decides the graph.
    weights
        A scheme of the family "graph".

    References
    ----------
    Steger and Wormald, "Generating random regular graphs quickly", 1999 (the algorithm).
    Friedman, "A proof of Alon's second eigenvalue conjecture", 2003 (the rate).

    Examples
    --------
    >>> topologies.build("random_regular", 8, seed=1).round(0).num_sources().tolist()
    [3, 3, 3, 3, 3, 3, 3, 3]
    """
    if degree is None:
        degree = min(4 if world_size % 2 else 3, world_size - 1)
    degree = check_integer("degree", degree, minimum=1)
    possible = range(2, world_size, 1 + world_size % 2) if world_size > 2 else (1,)
    advice = f"for {world_size} ranks a degree out of {listed(possible, most=6)}."
    if degree == 1 < world_size - 1:
        raise ValueError(
            f"degree 1 of topology 'random_regular' makes separate pairs, connected only for world_size 2, got "
            f"{world_size}; choose {advice}"
        )
    check_served(
        "random_regular",
        world_size,
        f"above degree = {degree}" + (" and even" if degree % 2 else ""),
        lambda size: size > degree and not size * degree % 2,
        sparse=(degree + 1, degree + 2),
        advice=f"Choose one of these, or {advice}",
    )

    def draw(*, seed: int) -> nx.Graph:
        if degree == 2:  # a connected one is a cycle, and seldom found by chance
            return nx.cycle_graph(np.random.default_rng(seed).permutation(world_size).tolist())
        if 2 * degree < world_size:
            return nx.random_regular_graph(degree, world_size, seed=seed)
        # networkx hardly ever ends on dense graphs; those that are missing the fewest edges are as random.
        return nx.complement(nx.random_regular_graph(world_size - 1 - degree, world_size, seed=seed))

    num_edges = world_size * degree / 2.0
    return _drawn("random_regular", world_size, draw, num_edges, weights=weights, seed=seed, degree=degree)


@register("erdos_renyi")
def erdos_renyi(
    world_size: int, *, probability: float | None = None, seed: int = 0, weights: str = "metropolis"
) -> Topology:
    """Every pair of ranks is an edge with the same probability, drawn again until connected; Metropolis weights.

    The graph G(n, p) with p = ``probability``, conditioned on being connected, which is likely above ln(n) / n.

    Properties
    ----------
    sizes : any n
    degree : p (n - 1) on average, at most n - 1
    period : 1
    exact : never promised; after 1 round for probability 1
    rate : SLEM as measured by describe()
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    probability
        Above 0 and at most 1. By default ``2 ln(n) / n``, twice the threshold of connectivity, but at most 1.
    seed
        At least 0; with n and the probability it decides the graph.
    weights
        A scheme of the family "graph".

    References
    ----------
    Erdős and Rényi, "On random graphs I", 1959, Theorem 1.

    Examples
    --------
    >>> topologies.build("erdos_renyi", 4, probability=1).round(0).neighbours(0)
    {1: 0.25, 2: 0.25, 3: 0.25}
    """
    if probability is None:
        probability = min(1.0, 2.0 * math.log(world_size) / world_size)
    probability = check_real("probability", probability, "above 0 and at most 1", example=0.5)
    draw = functools.partial(nx.fast_gnp_random_graph, world_size, probability)
    num_edges = max(probability * world_size * (world_size - 1) / 2.0, world_size)
    return _drawn("erdos_renyi", world_size, draw, num_edges, weights=weights, seed=seed, probability=probability)


@register("watts_strogatz")
def watts_strogatz(
    world_size: int,
    *,
    neighbours: int | None = None,
    probability: float = 0.1,
    seed: int = 0,
    weights: str = "metropolis",
) -> Topology:
    """A small world: a ring with its nearest neighbours, some edges rewired at random; Metropolis weights.

    i ~ i ± h mod n for h = 1 .. k / 2, k = ``neighbours``; then one end of every edge moves to a random rank with
    the ``probability``. Drawn again until connected. A few long edges make a slow ring fast.

    Properties
    ----------
    sizes : at least neighbours
    degree : neighbours on average, at most n - 1
    period : 1
    exact : never promised; after 1 round for neighbours >= n - 1
    rate : SLEM as measured by describe()
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    neighbours
        Even, at least 2 and at most n. By default 4, or 2 for two and three ranks.
    probability
        Between 0, the ring, and 1.
    seed
        At least 0; with n and the other options it decides the graph.
    weights
        A scheme of the family "graph".

    References
    ----------
    Watts and Strogatz, "Collective dynamics of 'small-world' networks", 1998.

    Examples
    --------
    >>> topologies.build("watts_strogatz", 8, neighbours=2, probability=0).round(0).peers(0)
    (1, 7)
    """
    if neighbours is None:
        neighbours = min(4, world_size - world_size % 2)
    neighbours = check_integer("neighbours", neighbours, minimum=2)
    if neighbours % 2:
        raise ValueError(
            f"neighbours of topology 'watts_strogatz' must be even, half of them on each side, got {neighbours}; use "
            f"{neighbours - 1} or {neighbours + 1}"
        )
    check_served(
        "watts_strogatz",
        world_size,
        f"at least neighbours = {neighbours}",
        lambda size: size >= neighbours,
        sparse=(neighbours,),
        advice=f"Choose one of these, or at most {world_size - world_size % 2} neighbours for {world_size} ranks.",
    )
    probability = check_real("probability", probability, "between 0 and 1", example=0.1)
    draw = functools.partial(nx.watts_strogatz_graph, world_size, neighbours, probability)
    options = {"neighbours": neighbours, "probability": probability}
    return _drawn(
        "watts_strogatz", world_size, draw, world_size * neighbours / 2.0, weights=weights, seed=seed, **options
    )


@register("barabasi_albert")
def barabasi_albert(
    world_size: int, *, attachments: int | None = None, seed: int = 0, weights: str = "metropolis"
) -> Topology:
    """A graph with a few hubs: each new rank attaches to some others, drawn by their degree; Metropolis weights.

    Ranks 0 .. m with m = ``attachments`` begin as a star; every later one attaches to m earlier ranks, drawn with
    probabilities proportional to their degrees. Always connected, with (n - m) m edges.

    Properties
    ----------
    sizes : above attachments
    degree : below 2 attachments on average, about attachments sqrt(n) at the hubs
    period : 1
    exact : never promised
    rate : SLEM as measured by describe()
    weights : 1/(1 + max(d_i, d_j)), symmetric

    Parameters
    ----------
    attachments
        At least 1 (a tree) and below n. By default 2, or 1 for two ranks.
    seed
        At least 0; with n and the attachments it decides the graph.
    weights
        A scheme of the family "graph".

    References
    ----------
    Barabási and Albert, "Emergence of scaling in random networks", 1999.

    Examples
    --------
    >>> topologies.build("barabasi_albert", 8, attachments=1).round(0).num_sources().sum().item()
    14
    """
    if attachments is None:
        attachments = min(2, world_size - 1)
    attachments = check_integer("attachments", attachments, minimum=1)
    check_served(
        "barabasi_albert",
        world_size,
        f"above attachments = {attachments}",
        lambda size: size > attachments,
        sparse=(attachments + 1,),
        advice=f"Choose one of these, or at most {world_size - 1} attachments for {world_size} ranks.",
    )
    draw = functools.partial(nx.barabasi_albert_graph, world_size, attachments)
    num_edges = attachments * (world_size - attachments)
    return _drawn("barabasi_albert", world_size, draw, num_edges, weights=weights, seed=seed, attachments=attachments)


def _drawn(
    family: str,
    world_size: int,
    draw: Callable[..., nx.Graph],
    num_edges: float,
    *,
    weights: str,
    seed: int,
    **options: Any,
) -> Topology:
    """Return the topology of the first connected graph with about so many edges; attempt a is drawn from (seed, a)."""
    (option, value), *_ = options.items()
    check_stored(family, world_size, num_edges, most=_MOST_DRAWN, advice=f"or a smaller {option}")
    seed = check_integer("seed", seed, minimum=0)
    num_graphs = size = 0
    while num_graphs < _MAX_ATTEMPTS and size < _MOST_DRAWN_IN_ALL:
        graph = draw(seed=int(np.random.default_rng((seed, num_graphs)).integers(1 << 32)))
        if nx.is_connected(graph):
            edges = sorted((min(edge), max(edge)) for edge in graph.edges)
            return weighted_topology(world_size, edges, weights, seed=seed, **options)
        num_graphs += 1
        size += len(graph) + graph.number_of_edges()
    raise ValueError(
        f"topology {family!r} drew {num_graphs} graphs from seed {seed} and none is connected; raise the {option}, "
        f"{value:g}"
    )

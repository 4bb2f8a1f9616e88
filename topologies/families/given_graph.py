"""Any graph as a topology."""

import math
from dataclasses import replace

import networkx as nx
import numpy as np
import numpy.typing as npt

from topologies.analysis.exactness import sums
from topologies.graphs.edge_weights import warn_if_values_circulate, weighted_round
from topologies.graphs.graph_files import GraphSource, clean_graph, read_graph
from topologies.round import Round
from topologies.topology import Topology, register
from topologies.validation import SUM_TOLERANCE


@register("graph", variants=lambda world_size, _: [{"graph": nx.wheel_graph(world_size)}])
def graph(world_size: int, *, graph: GraphSource, weights: str = "metropolis") -> Topology:
    """A graph as it is, in every round; rank r is the node with the r-th label in sorted order.

    With d_i the number of others that rank i reads, L the Laplacian of the graph and W[i, j] the weight of the edge
    j -> i, which carries data from j to i: every edge is used in every round. The graph is recorded in the
    options, so the topology no longer needs the file.

    Properties
    ----------
    sizes : the number of nodes of the graph
    degree : that of the graph
    period : 1
    exact : never promised; after 1 round for a complete graph and equal weights
    rate : SLEM of W, as measured by describe(); smallest for fdla
    weights : as the scheme; symmetric for an undirected graph but for uniform, push_sum and given

    Parameters
    ----------
    graph
        A networkx graph, its node-link data, or a file: GraphML, GEXF, edge list or node-link JSON, by suffix.
    weights
        From the degrees: "metropolis", ``1 / (1 + max(d_i, d_j))``; "metropolis_hastings", ``1 / max(d_i, d_j)``;
        "max_degree", ``1 / (1 + max d)``; "lazy", half of metropolis. For directed graphs too: "uniform",
        ``1 / (1 + d_i)``, only row-stochastic if the graph is irregular, and "push_sum", ``1 / (1 + outdegree_j)``,
        then only column-stochastic. From the spectrum: "best_constant", ``2 / (lambda_max + lambda_2)`` of L; for at
        most 100 ranks and with cvxpy the fastest weights of all, "fdla", and of all without negative ones, "fmmc".
        Weights of "best_constant" and "fdla" may be negative. "given" takes the edge attribute ``weight`` as
        W[i, j], and a self-loop's as W[i, i], which is by default what the others leave.

    Raises
    ------
    ValueError
        If the graph is not connected (directed: not strongly), of another size, or has a weight that is not a positive
        number or labels without an order; or if given weights sum to 1 neither by rows nor by columns.
    ImportError
        If weights are "fdla" or "fmmc" and cvxpy is not installed.

    References
    ----------
    Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004.
    Boyd, Diaconis and Xiao, "Fastest mixing Markov chain on a graph", 2004.

    Examples
    --------
    >>> import networkx, topologies
    >>> star = networkx.star_graph(3)
    >>> topologies.build("graph", 4, graph=star, weights="best_constant").round(0).neighbours(1)
    {0: 0.4}
    """
    cleaned = clean_graph(read_graph(graph), weights, world_size=world_size)
    if weights == "given":
        round_ = _given_round(cleaned)
    else:
        edges = np.array(cleaned.edges, dtype=np.int64)
        round_ = weighted_round(world_size, edges, weights, directed=cleaned.is_directed())
    return repeated(round_, graph=nx.node_link_data(cleaned, edges="edges"), weights=weights)


def weighted_topology(world_size: int, edges: npt.ArrayLike, weights: str, **options: object) -> Topology:
    """Return the topology that uses all edges of an undirected graph in every round; for families of graphs."""
    return repeated(weighted_round(world_size, edges, weights), weights=weights, **options)


def repeated(round_: Round, **options: object) -> Topology:
    """Return the topology of one round that is as stochastic as its weights are."""
    # Where neither sum is 1, "doubly" makes the topology refuse its round and name the row.
    stochasticity = sums([round_]).proven or "doubly"
    return replace(Topology.from_rounds([round_], stochasticity=stochasticity), options=options)


def _given_round(graph: nx.Graph) -> Round:
    rows: list[dict[int, float]] = [{} for _ in graph]
    for source, target, weight in graph.edges(data="weight"):
        rows[target][source] = float(weight)
        if not graph.is_directed():
            rows[source][target] = float(weight)
    for rank, row in enumerate(rows):
        if rank not in row:
            left = 1.0 - math.fsum(row.values())
            if left < -SUM_TOLERANCE:
                raise ValueError(
                    f"the weights of graph that rank {rank} gives to others sum to {1.0 - left!r}, which leaves "
                    f"{left!r} for itself; scale them to a sum of at most 1, or give what it keeps as the weight of a "
                    f"self-loop"
                )
            row[rank] = max(left, 0.0)
    round_ = Round.from_rows(rows)
    if sums([round_]).proven is None:
        raise ValueError(
            "the weights of graph sum to 1 neither over what every rank reads nor over what reads it; scale the edge "
            "weights, remove the self-loops (a rank then keeps what the others leave), or use a scheme such as "
            "weights='uniform'"
        )
    warn_if_values_circulate(round_, "given")
    return round_

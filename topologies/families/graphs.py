"""Any graph as a topology."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import networkx as nx
import numpy as np

from topologies.files import clean_graph, read_graph
from topologies.registry import register
from topologies.round import Round
from topologies.topology import Topology
from topologies.validation import measure_stochasticity
from topologies.weights import weighted_round


@register("graph", variants=lambda world_size, _: [{"graph": nx.wheel_graph(world_size)}])
def graph(
    world_size: int,
    *,
    graph: str | os.PathLike[str] | nx.Graph | Mapping[str, Any],
    weights: str = "metropolis",
) -> Topology:
    """A graph as it is, in every round; rank r is the node with the r-th label in sorted order.

    An edge j -> i of a directed graph carries data from j to i. W[i, j] follows from the degrees, or is the weight of
    the edge. The graph is recorded in the options, so the topology no longer needs the file.

    Properties
    ----------
    sizes : the number of nodes
    degree : the graph's
    period : 1
    exact : not promised
    rate : measured: depends on the graph and its weights
    weights : 1 / (1 + the larger degree), symmetric; or as chosen

    Parameters
    ----------
    graph
        A networkx graph, its node-link data, or a file: GraphML, GEXF, edge list or node-link JSON, by suffix.
    weights
        "metropolis", "metropolis_hastings", "max_degree", "lazy" or "uniform" follow from the degrees (only
        "uniform" serves directed graphs). "given" takes the edge attribute ``weight`` as W[i, j], and a
        self-loop's as W[i, i], which is by default what the others leave.

    Raises
    ------
    ValueError
        If the graph is empty, not connected (directed: not strongly), of another size, or has a weight that
        is not a positive number; or, with given weights, if neither rows nor columns sum to 1.

    References
    ----------
    Xiao, Boyd and Lall, "A scheme for robust distributed sensor fusion based on average consensus", 2005, section 3.

    Examples
    --------
    >>> import networkx as nx
    >>> import topologies
    >>> topologies.build("graph", 10, graph=nx.petersen_graph()).round(0).neighbours(0)
    {1: 0.25, 4: 0.25, 5: 0.25}
    """
    cleaned = clean_graph(read_graph(graph), weights)
    if len(cleaned) != world_size:
        raise ValueError(
            f"graph has {len(cleaned)} nodes, world_size is {world_size}; one rank stands for one node: use "
            f"world_size {len(cleaned)}"
        )
    if weights == "given":
        round_ = _given_round(cleaned)
    else:
        edges = np.array(cleaned.edges, dtype=np.int64)
        round_ = weighted_round(world_size, edges, weights, directed=cleaned.is_directed())
    # Where neither sum is 1, "doubly" makes the topology refuse its round and name the row.
    stochasticity = measure_stochasticity(round_) or "doubly"
    topology = Topology.from_rounds([round_], stochasticity=stochasticity)
    options = {"graph": nx.node_link_data(cleaned, edges="edges"), "weights": weights}
    return Topology(world_size, topology.make_round, 1, stochasticity, options=options)


def _given_round(graph: nx.Graph) -> Round:
    rows: list[dict[int, float]] = [{} for _ in graph]
    for source, target, weight in graph.edges(data="weight"):
        rows[target][source] = float(weight)
        if not graph.is_directed():
            rows[source][target] = float(weight)
    return Round.from_rows(rows)

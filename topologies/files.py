"""Graphs from files, and graphs made fit for ranks: connected, simple, with nodes 0 .. n-1."""

from __future__ import annotations

import json
import math
import numbers
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import networkx as nx

from topologies.weights import DIRECTED_SCHEMES, SCHEMES, unknown_scheme


def read_graph(source: str | os.PathLike[str] | nx.Graph | Mapping[str, Any]) -> nx.Graph:
    """Return the graph of a file, of node-link data, or the graph itself.

    Parameters
    ----------
    source
        A path with the suffix .graphml, .gexf, .edgelist (lines ``a b``, ``a b weight`` or ``a b {..}``) or .json
        (node-link), a mapping in node-link form, or a networkx graph.

    Raises
    ------
    ValueError
        If the suffix is unknown, the file does not hold such a graph, or the graph has no nodes.
    FileNotFoundError
        If there is no such file.
    """
    if isinstance(source, nx.Graph):
        graph = source
    elif isinstance(source, Mapping):
        graph = _from_node_link(source)
    elif isinstance(source, str | os.PathLike):
        graph = _from_file(Path(source))
    else:
        raise TypeError(
            f"graph must be a networkx graph, a path or node-link data, got {type(source).__name__}; pass one of these"
        )
    if not len(graph):
        raise ValueError("graph has no nodes; pass a graph with one node per rank")
    return graph


def clean_graph(graph: nx.Graph, weights: str = "metropolis") -> nx.Graph:
    """Return the graph for n ranks: simple, connected, nodes 0 .. n-1 in the sorted order of their labels.

    Labels that are all texts of integers sort as integers. Self-loops and parallel edges are dropped, and edge
    weights ignored, with a warning, where the scheme takes its weights from the degrees.

    Raises
    ------
    ValueError
        If the graph is not (strongly) connected, has a weight that is not a positive number, or
        parallel edges whose given weights contradict each other.
    """
    if weights != "given" and weights not in SCHEMES:
        raise unknown_scheme(weights)
    _check_weights(graph, weights)
    simple = _merge_parallel_edges(graph, weights)
    if weights != "given":
        simple = _drop_loops(simple)
    if simple.is_directed() and weights not in DIRECTED_SCHEMES:
        if any(not simple.has_edge(target, source) for source, target in simple.edges):
            raise ValueError(
                f"graph is directed and has an edge without its reverse, but weights={weights!r} is for "
                f"undirected graphs; use weights='uniform' or 'given', or graph.to_undirected()"
            )
        simple = simple.to_undirected()
    _check_connected(simple)
    rank_of = {label: rank for rank, label in enumerate(_sorted_labels(list(simple)))}
    edges = []
    for source, target, weight in simple.edges(data="weight", default=1.0):
        pair = (rank_of[source], rank_of[target])
        edges.append((*(pair if simple.is_directed() else sorted(pair)), float(weight)))
    cleaned = nx.DiGraph() if simple.is_directed() else nx.Graph()
    cleaned.add_nodes_from(range(len(rank_of)))
    # Sorted: the order in which the graph was built, or read from a set, must not show on any rank.
    for source, target, weight in sorted(edges):
        cleaned.add_edge(source, target, **({"weight": weight} if weights == "given" else {}))
    return cleaned


def _check_weights(graph: nx.Graph, weights: str) -> None:
    found = set()
    for source, target, weight in graph.edges(data="weight"):
        if weight is None:
            if weights == "given":
                raise ValueError(
                    f"the edge {source!r} - {target!r} of graph has no weight, but weights='given'; set its "
                    f"attribute 'weight', or use another scheme"
                )
            continue
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight) or weight <= 0:
            raise ValueError(
                f"the edge {source!r} - {target!r} of graph has the weight {weight!r}, it must be a positive "
                f"number; remove the edge or correct it (a matrix with negative weights goes through "
                f"Round.from_matrix)"
            )
        found.add(float(weight))
    if weights != "given" and len(found) > 1:
        _warn(
            f"the edge weights of graph are ignored: weights={weights!r} follows from the degrees; pass "
            f"weights='given' to use them, or remove them"
        )


def _merge_parallel_edges(graph: nx.Graph, weights: str) -> nx.Graph:
    if not graph.is_multigraph():
        return graph
    simple = nx.DiGraph(graph) if graph.is_directed() else nx.Graph(graph)
    if simple.number_of_edges() < graph.number_of_edges():
        if weights == "given":
            raise ValueError(
                "graph has parallel edges, and with weights='given' it is not clear which weight counts; merge "
                "them first"
            )
        _warn("parallel edges of graph count once; merge them to silence this warning")
    return simple


def _drop_loops(graph: nx.Graph) -> nx.Graph:
    loops = list(nx.selfloop_edges(graph))
    if not loops:
        return graph
    _warn(f"{len(loops)} self-loops of graph are dropped: the scheme decides what a rank keeps; remove them first")
    without = graph.copy()
    without.remove_edges_from(loops)
    return without


def _check_connected(graph: nx.Graph) -> None:
    components = nx.strongly_connected_components if graph.is_directed() else nx.connected_components
    parts = sorted(components(graph), key=len, reverse=True)
    if len(parts) > 1:
        strongly = "strongly " if graph.is_directed() else ""
        raise ValueError(
            f"graph is not {strongly}connected: {len(parts)} components of {', '.join(map(str, map(len, parts)))} "
            f"nodes, so the ranks would never agree; add edges, or take the largest component"
        )


def _sorted_labels(labels: list[Any]) -> list[Any]:
    """Sort labels the same way on every rank: by value, never by hash or order of insertion."""
    if all(isinstance(label, str) for label in labels):
        try:
            if len({int(label) for label in labels}) == len(labels):
                return sorted(labels, key=int)
        except ValueError:
            pass
    try:
        return sorted(labels)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels})
        raise ValueError(
            f"graph has labels of the types {', '.join(kinds)}, which have no common order; relabel its nodes with "
            f"integers or strings"
        ) from None


def _from_file(path: Path) -> nx.Graph:
    if path.suffix.lower() not in _READERS:
        raise ValueError(
            f"graph file {str(path)!r} has the suffix {path.suffix!r}; known are {', '.join(_READERS)}; rename or "
            f"convert it"
        )
    if not path.is_file():
        raise FileNotFoundError(f"graph file {str(path)!r} does not exist; check the path")
    try:
        return _READERS[path.suffix.lower()](path)
    except Exception as error:  # the parsers raise many types; none of them names the file
        raise ValueError(
            f"graph file {str(path)!r} does not hold a graph in the format of its suffix "
            f"({type(error).__name__}: {error}); check the file"
        ) from error


def _from_node_link(data: Mapping[str, Any]) -> nx.Graph:
    if "nodes" not in data or not {"edges", "links"} & set(data):
        raise ValueError(
            f"node-link data needs the keys nodes and edges (or links), got {sorted(map(str, data))}; write it "
            f"with networkx.node_link_data"
        )
    return nx.node_link_graph(dict(data), edges="edges" if "edges" in data else "links")


def _read_node_link(path: Path) -> nx.Graph:
    return _from_node_link(json.loads(path.read_text(encoding="utf-8")))


def _read_edge_list(path: Path) -> nx.Graph:
    try:
        return nx.read_edgelist(path)
    except (TypeError, IndexError):  # a third column that is a number, not a dictionary
        return nx.read_weighted_edgelist(path)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


_READERS: dict[str, Callable[[Path], nx.Graph]] = {
    ".graphml": nx.read_graphml,
    ".gexf": nx.read_gexf,
    ".edgelist": _read_edge_list,
    ".edges": _read_edge_list,
    ".txt": _read_edge_list,
    ".json": _read_node_link,
}

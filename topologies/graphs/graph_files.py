"""Graphs from files, which are never read in part, and graphs made fit for ranks: connected, with nodes 0 .. n-1."""

import ast
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import networkx as nx

from topologies.graphs.edge_weights import DIRECTED_SCHEMES, SCHEMES, directed_graph, unknown_scheme
from topologies.validation import check_real, listed

#: A graph as users give it: a networkx graph, a file or node-link data.
GraphSource: TypeAlias = nx.Graph | str | os.PathLike[str] | Mapping[str, Any]


def read_graph(source: GraphSource) -> nx.Graph:
    """Return the graph of a file, of node-link data, or the graph itself.

    A path has the suffix .graphml, .gexf, .json (node-link), or .edgelist, .edges or .txt (lines ``a b``,
    ``a b weight`` or ``a b {..}``, separated by spaces or commas; ``#`` begins a comment). An edge list does not say
    whether it is directed and counts as undirected; read a directed one with ``networkx.read_edgelist(path,
    create_using=networkx.DiGraph)`` and pass the graph.
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


def _from_file(path: Path) -> nx.Graph:
    name = repr(str(path)[-200:])  # its end: a whole document may stand in place of a path
    if path.suffix.lower() not in _READERS:
        raise ValueError(f"graph file {name} has none of the suffixes {', '.join(_READERS)}; rename or convert it")
    try:
        return _READERS[path.suffix.lower()](path)
    except FileNotFoundError:
        raise FileNotFoundError(f"graph file {name} does not exist; check the path") from None
    except Exception as error:  # the parsers raise many types; none of them names the file
        raise ValueError(
            f"graph file {name} does not hold a graph in the format of its suffix "
            f"({type(error).__name__}: {error}); check the file"
        ) from error


def _from_node_link(data: Mapping[str, Any]) -> nx.Graph:
    """Return the graph of node-link data; an edge that names a node that is not listed is refused."""
    try:
        graph = nx.node_link_graph(dict(data), edges="edges" if "edges" in data else "links")
    except (AttributeError, KeyError, TypeError, nx.NetworkXError) as error:
        raise ValueError(
            f"this is no node-link data ({type(error).__name__}: {error}); it has the keys nodes and edges (or links), "
            f"write it with networkx.node_link_data"
        ) from error
    _check_number_of_nodes(graph, len(data["nodes"]))
    return graph


def _check_number_of_nodes(graph: nx.Graph, num_listed: int) -> None:
    """Refuse a graph of which networkx made nodes of misspelt ends of edges, or one node of two."""
    if len(graph) != num_listed:
        raise ValueError(
            f"the graph lists {num_listed} nodes, but there are {len(graph)} different ones among them and the ends of "
            f"its edges; correct the names"
        )


def _read_xml(read: Callable[[Path], nx.Graph], path: Path) -> nx.Graph:
    graph = read(path)
    _check_number_of_nodes(graph, len(re.findall(r"<(?:\w+:)?node\b", path.read_text(encoding="utf-8"))))
    return graph


def _read_edge_list(path: Path) -> nx.Graph:
    # As a multigraph: the same pair twice, with other weights perhaps, must not go unnoticed.
    graph = nx.MultiGraph()
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        ends, brace, attributes = line.partition("#")[0].partition("{")
        fields = re.split(r"\s*,\s*|\s+", ends.strip())
        if brace and not fields[-1]:  # a comma before the attributes
            fields.pop()
        if fields == [""]:
            continue
        if not all(fields) or len(fields) not in ((2,) if brace else (2, 3)):
            raise ValueError(f"line {number} is {line[:120]!r}, it must be 'a b', 'a b weight' or 'a b {{..}}'")
        data = {"weight": float(fields[2])} if len(fields) == 3 else ast.literal_eval(brace + attributes or "{}")
        graph.add_edge(fields[0], fields[1], **data)
    return graph


_READERS: dict[str, Callable[[Path], nx.Graph]] = {
    ".graphml": partial(_read_xml, nx.read_graphml),
    ".gexf": partial(_read_xml, nx.read_gexf),
    ".edgelist": _read_edge_list,
    ".edges": _read_edge_list,
    ".txt": _read_edge_list,
    ".json": lambda path: _from_node_link(json.loads(path.read_text(encoding="utf-8-sig"))),
}


def clean_graph(graph: nx.Graph, weights: str | None = None, *, world_size: int | None = None) -> nx.Graph:
    """Return the graph for n ranks: simple, connected, nodes 0 .. n-1 in the sorted order of their labels.

    Labels that are all texts of integers sort as integers, other texts as Python sorts them ("b10" before "b9").
    Parallel edges are merged, and self-loops dropped and edge weights ignored unless they are the weights, with a
    warning.

    ``weights`` is the scheme, ``None`` for a family that has no such option and needs the edges of an undirected graph
    alone; ``world_size`` is how many nodes there must be, if that is known.
    """
    if weights is not None and weights != "given" and weights not in SCHEMES:
        raise unknown_scheme(weights, (*SCHEMES, "given"))
    _check_weights(graph, weights)
    simple = _merge_parallel_edges(graph, weights)
    if weights != "given":
        simple = _drop_loops(simple)
    if simple.is_directed() and weights not in DIRECTED_SCHEMES:
        if any(not simple.has_edge(target, source) for source, target in simple.edges):
            if weights is None:
                raise ValueError("graph is directed and has an edge without its reverse; pass graph.to_undirected()")
            raise directed_graph(weights)
        simple = simple.to_undirected()
    _check_connected(simple)
    if world_size not in (None, len(simple)):
        raise ValueError(
            f"graph has {len(simple)} nodes, world_size is {world_size}; one rank stands for one node: use world_size "
            f"{len(simple)}"
        )
    rank_of = {label: rank for rank, label in enumerate(_sorted_labels(list(simple)))}
    edges = []
    for source, target, weight in simple.edges(data="weight"):
        pair = (rank_of[source], rank_of[target])
        attributes = {"weight": float(weight)} if weights == "given" else {}
        edges.append((*(pair if simple.is_directed() else sorted(pair)), attributes))
    cleaned = nx.DiGraph() if simple.is_directed() else nx.Graph()
    cleaned.add_nodes_from(range(len(rank_of)))
    # Sorted: the order in which the graph was built, or read from a set, must not show on any rank.
    cleaned.add_edges_from(sorted(edges, key=lambda edge: edge[:2]))
    return cleaned


def _check_weights(graph: nx.Graph, weights: str | None) -> None:
    found = set()
    for source, target, weight in graph.edges(data="weight"):
        if weight is not None:
            edge = f"the weight of the edge {source!r} - {target!r} of graph"
            found.add(check_real(edge, weight, "above 0 and finite", example=0.5))
        elif weights == "given":
            raise ValueError(
                f"the edge {source!r} - {target!r} of graph has no weight, but weights='given'; set its attribute "
                f"'weight', or use another scheme"
            )
    if weights != "given" and len(found) > 1:
        _warn(
            "the edge weights of graph are ignored: nothing but weights='given' of the family 'graph' reads them; use "
            "it, or remove them"
        )


def _merge_parallel_edges(graph: nx.Graph, weights: str | None) -> nx.Graph:
    if not graph.is_multigraph():
        return graph
    simple = nx.DiGraph(graph) if graph.is_directed() else nx.Graph(graph)
    if simple.number_of_edges() < graph.number_of_edges():
        if weights == "given":
            for source, target, weight in graph.edges(data="weight"):
                if weight != simple[source][target]["weight"]:
                    raise ValueError(
                        f"graph has parallel edges {source!r} - {target!r} of different weights, and weights='given' "
                        f"cannot tell which counts; merge them first"
                    )
        _warn("parallel edges of graph count once; merge them to silence this warning")
    return simple


def _drop_loops(graph: nx.Graph) -> nx.Graph:
    loops = list(nx.selfloop_edges(graph))
    if not loops:
        return graph
    _warn(f"{len(loops)} self-loops of graph are dropped: the weights decide what a rank keeps; remove them first")
    without = graph.copy()
    without.remove_edges_from(loops)
    return without


def _check_connected(graph: nx.Graph) -> None:
    components = nx.strongly_connected_components if graph.is_directed() else nx.connected_components
    sizes = sorted(map(len, components(graph)), reverse=True)
    if len(sizes) > 1:
        strongly = "strongly " if graph.is_directed() else ""
        raise ValueError(
            f"graph is not {strongly}connected: {len(sizes)} components of {listed(sizes, most=5)} nodes, so the ranks "
            f"would never agree; add edges, or take the largest component"
        )


def _sorted_labels(labels: list[Any]) -> list[Any]:
    """Sort labels the same way on every rank: by value, never by hash or order of insertion."""
    if all(isinstance(label, str) and re.fullmatch("-?[0-9]+", label) for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    try:
        ordered = sorted(labels)
        # Sets compare without a TypeError, but not all of them; and nothing compares with NaN.
        in_order = all(one < other for one, other in itertools.pairwise(ordered))
    except TypeError:
        in_order = False
    if not in_order:
        kinds = sorted({type(label).__name__ for label in labels})
        raise ValueError(
            f"graph has labels of the types {', '.join(kinds)}, which have no common order; relabel its nodes with "
            f"integers or strings"
        )
    return ordered


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)

"""Graphs from files and from node-link data; a file that holds no such graph is refused, never read in part."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import networkx as nx


def from_file(path: Path) -> nx.Graph:
    """Return the graph of a file in the format of its suffix."""
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


def from_node_link(data: Mapping[str, Any]) -> nx.Graph:
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


def _read_xml(read: Callable[[Path], nx.Graph]) -> Callable[[Path], nx.Graph]:
    def read_checked(path: Path) -> nx.Graph:
        graph = read(path)
        _check_number_of_nodes(graph, len(re.findall(r"<(?:\w+:)?node\b", path.read_text(encoding="utf-8"))))
        return graph

    return read_checked


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
    ".graphml": _read_xml(nx.read_graphml),
    ".gexf": _read_xml(nx.read_gexf),
    ".edgelist": _read_edge_list,
    ".edges": _read_edge_list,
    ".txt": _read_edge_list,
    ".json": lambda path: from_node_link(json.loads(path.read_text(encoding="utf-8-sig"))),
}

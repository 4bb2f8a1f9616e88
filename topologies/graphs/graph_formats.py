"""Graphs from files and from node-link data; a file that holds no such graph is refused, never read in part."""

from __future__ import annotations

import ast
import functools
import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx

# Shortens what a user gave by mistake: a whole document in place of a path.
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 120


def from_file(path: Path) -> nx.Graph:
    """Return the graph of a file in the format of its suffix.

    Raises
    ------
    ValueError
        If the suffix is unknown, or the file does not hold such a graph.
    FileNotFoundError
        If there is no such file.
    """
    name = _BRIEF.repr(str(path))
    if path.suffix.lower() not in _READERS:
        raise ValueError(
            f"graph file {name} has the suffix {_BRIEF.repr(path.suffix)}; known are {', '.join(_READERS)}; rename or "
            f"convert it"
        )
    try:
        exists = path.is_file()
    except OSError as error:  # a name that is too long, a folder that is closed
        raise ValueError(f"graph file {name} cannot be looked up ({error.strerror}); check the path") from error
    if not exists:
        raise FileNotFoundError(f"graph file {name} does not exist; check the path")
    try:
        graph = _READERS[path.suffix.lower()](path)
    except Exception as error:  # the parsers raise many types; none of them names the file
        raise ValueError(
            f"graph file {name} does not hold a graph in the format of its suffix "
            f"({type(error).__name__}: {error}); check the file"
        ) from error
    if not len(graph):
        raise ValueError(f"graph file {name} has no nodes; it needs one node per rank")
    return graph


def from_node_link(data: Mapping[str, Any]) -> nx.Graph:
    """Return the graph of node-link data.

    Raises
    ------
    ValueError
        If a key is missing, a node is named twice, or an edge names a node that is not listed.
    """
    if "nodes" not in data or not {"edges", "links"} & set(data):
        raise ValueError(
            f"node-link data needs the keys nodes and edges (or links), got {sorted(map(str, data))}; write it "
            f"with networkx.node_link_data"
        )
    edges = "edges" if "edges" in data else "links"
    _check_items(data, "nodes", ("id",))
    _check_items(data, edges, ("source", "target"))
    if not isinstance(data.get("graph", {}), Mapping):
        raise _not_node_link(f"graph must be a mapping of attributes, got {_BRIEF.repr(data['graph'])}")
    labels = set()
    for number, node in enumerate(data["nodes"]):
        if (label := _label(node["id"], f"nodes[{number}] has the id")) in labels:
            raise _not_node_link(f"nodes[{number}] repeats the id {_BRIEF.repr(label)}")
        labels.add(label)
    for number, edge in enumerate(data[edges]):
        for end in ("source", "target"):
            if _label(edge[end], f"{edges}[{number}] has the {end}") not in labels:
                raise _not_node_link(
                    f"{edges}[{number}] has the {end} {_BRIEF.repr(edge[end])}, which is not among the nodes"
                )
    return nx.node_link_graph(dict(data), edges=edges)


def _check_items(data: Mapping[str, Any], key: str, needs: tuple[str, ...]) -> None:
    if not isinstance(data[key], list | tuple):
        raise _not_node_link(f"{key} must be a list, got {_BRIEF.repr(data[key])}")
    for number, item in enumerate(data[key]):
        if not isinstance(item, Mapping) or not set(needs) <= set(item):
            raise _not_node_link(
                f"{key}[{number}] must be a mapping with {' and '.join(needs)}, got {_BRIEF.repr(item)}"
            )


def _label(value: Any, what: str) -> Any:
    """Return the label as networkx reads it: lists are tuples."""
    label = tuple(_label(item, what) for item in value) if isinstance(value, list | tuple) else value
    try:
        hash(label)
    except TypeError:
        raise _not_node_link(f"{what} {_BRIEF.repr(value)}, which is no label") from None
    return label


def _not_node_link(reason: str) -> ValueError:
    return ValueError(f"this is no node-link data: {reason}; write it with networkx.node_link_data")


def _read_xml(read: Callable[[Path], nx.Graph], path: Path) -> nx.Graph:
    graph = read(path)
    # networkx makes a node of every end of an edge, also of one that is misspelt.
    elements = [(element.tag.rpartition("}")[2], element) for element in ElementTree.parse(path).iter()]
    labels = {element.get("id") for tag, element in elements if tag == "node"}
    for tag, element in elements:
        for end in ("source", "target"):
            if tag == "edge" and element.get(end) not in labels:
                raise ValueError(f"an edge has the {end} {_BRIEF.repr(element.get(end))}, which is not among the nodes")
    return graph


def _read_node_link(path: Path) -> nx.Graph:
    data = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(data, Mapping):
        raise _not_node_link(f"it is {_BRIEF.repr(data)}")
    return from_node_link(data)


def _read_edge_list(path: Path) -> nx.Graph:
    # As a multigraph: the same pair twice, with other weights perhaps, must not go unnoticed.
    graph = nx.MultiGraph()
    separator = None
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        ends, brace, attributes = content.partition("{")
        if not len(graph) and "," in ends:
            separator = ","
        fields = [field.strip() for field in ends.rstrip(", \t" if brace else None).split(separator)]
        # One separator in the whole file: what is left of another one would become part of a label.
        whole = all(field and "," not in field and len(field.split()) == 1 for field in fields)
        if not whole or len(fields) not in ((2,) if brace else (2, 3)):
            raise ValueError(
                f"line {number} is {_BRIEF.repr(line)}, it must be 'a b', 'a b weight' or 'a b {{..}}', with spaces or "
                f"with commas throughout the file"
            )
        graph.add_edge(fields[0], fields[1], **_edge_attributes(number, brace + attributes, *fields[2:]))
    return graph


def _edge_attributes(number: int, mapping: str, weight: str | None = None) -> dict[str, Any]:
    if mapping:
        try:
            found = ast.literal_eval(mapping)
            if isinstance(found, dict) and all(isinstance(key, str) for key in found):
                return found
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
        raise ValueError(f"line {number} ends in {_BRIEF.repr(mapping)}, which is no mapping of attributes by name")
    try:
        return {} if weight is None else {"weight": float(weight)}
    except ValueError:
        raise ValueError(f"line {number} has the weight {_BRIEF.repr(weight)}, which is no number") from None


_READERS: dict[str, Callable[[Path], nx.Graph]] = {
    ".graphml": functools.partial(_read_xml, nx.read_graphml),
    ".gexf": functools.partial(_read_xml, nx.read_gexf),
    ".edgelist": _read_edge_list,
    ".edges": _read_edge_list,
    ".txt": _read_edge_list,
    ".json": _read_node_link,
}

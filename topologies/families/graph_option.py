"""The undirected graph that a family is built on: a networkx graph, its data, a file, or another family's name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import networkx as nx
import numpy as np

from topologies.building import build
from topologies.family_registry import available
from topologies.graphs.graph_files import clean_graph, read_graph
from topologies.matrix_storage import IntArray
from topologies.registry import nearest_match
from topologies.round import Round

GraphOption: TypeAlias = str | os.PathLike[str] | nx.Graph | Mapping[str, Any]


def undirected_edges(world_size: int, graph: GraphOption) -> tuple[IntArray, str | dict[str, Any]]:
    """Return the edges of a connected graph on n ranks, shape ``[edges, 2]``, and what to record as the option.

    Parameters
    ----------
    world_size
        Number of ranks n.
    graph
        A networkx graph, its node-link data or a file, as :func:`topologies.graphs.graph_files.read_graph` takes it; or
        the name of a registered family that serves n without further options, and repeats one symmetric round. A text
        without a suffix is a name.

    Raises
    ------
    ValueError
        If the graph is directed, not connected or of another size, or there is no such family or none that can be
        used for n.
    """
    if isinstance(graph, str) and not Path(graph).suffix:
        return _edges_of_family(world_size, graph), graph
    cleaned = clean_graph(read_graph(graph), world_size=world_size)
    return np.array(cleaned.edges, dtype=np.int64).reshape(-1, 2), nx.node_link_data(cleaned, edges="edges")


def _edges_of_family(world_size: int, name: str) -> IntArray:
    if name not in available():
        nearest = nearest_match(name, available())
        hint = f"did you mean {nearest!r}? " if nearest else ""
        raise ValueError(
            f"graph={name!r} is no registered family, and no file without a suffix; {hint}pass one of "
            f"topologies.available(), a path such as 'graph.json', or a networkx graph"
        )
    instead = "use one such as 'ring' or 'torus', or pass a networkx graph"
    try:
        topology = build(name, world_size)
    except TypeError as error:
        raise ValueError(f"graph={name!r} names a family that has no default options ({error}); {instead}") from None
    except ValueError as error:
        raise ValueError(f"graph={name!r} names a family that does not serve this size: {error}") from None
    if topology.period != 1:
        rounds = "no period" if topology.period is None else f"{topology.period} rounds"
        raise ValueError(f"graph={name!r} names a family with {rounds}, which is no single graph; {instead}")
    round_ = topology.round(0)
    if not round_.is_symmetric:
        raise ValueError(f"graph={name!r} names a directed family, matchings need a symmetric round; {instead}")
    if len(round_.groups) > 1:
        raise ValueError(f"graph={name!r} names a family that does not connect {world_size} ranks; {instead}")
    return _edges_of(round_)


def _edges_of(round_: Round) -> IntArray:
    if round_.uniform_groups is not None:
        return np.stack(np.triu_indices(round_.world_size, k=1), axis=1)  # connected: one group of all
    pairs = [(rank, other) for rank in range(round_.world_size) for other in round_.neighbours(rank) if other > rank]
    return np.array(pairs, dtype=np.int64)

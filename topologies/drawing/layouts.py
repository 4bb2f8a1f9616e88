"""Where ranks stand in a picture. A family that is no circle has a line in the table ``_LAYOUTS``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from topologies.analysis.connectivity import distinct_rounds
from topologies.matrix_storage import FloatArray
from topologies.topology import available, build

if TYPE_CHECKING:
    from topologies.topology import Topology

_LARGEST_RADIUS = 0.12
#: Radius of a rank as a share of the distance to the nearest one: many need the place for their numbers.
_RADIUS_SHARE, _RADIUS_SHARE_OF_MANY, _MANY = 0.34, 0.42, 24


@dataclass(frozen=True, eq=False)
class Layout:
    """Places of all ranks, shape ``[n, 2]``: x to the right and y up, within -1 .. 1."""

    places: FloatArray
    #: Whether lines bend inwards, to pass the ranks between their ends.
    is_circle: bool = False
    #: ``(rows, columns)`` of a lattice that is closed to a torus: edges around it are cut at its border.
    closed_shape: tuple[int, int] | None = None

    @property
    def radius(self) -> float:
        distances = np.linalg.norm(self.places[:, None] - self.places, axis=2)
        share = _RADIUS_SHARE if len(self.places) <= _MANY else _RADIUS_SHARE_OF_MANY
        return float(min(_LARGEST_RADIUS, share * distances[~np.eye(len(distances), dtype=bool)].min(initial=np.inf)))

    def way_out(self, rank: int, other: int) -> complex | None:
        """Return the half step x + iy from ``rank`` over the border of a torus to ``other``, if that is their way."""
        if self.closed_shape is None:
            return None
        rows, columns = self.closed_shape
        down = other // columns - rank // columns
        right = other % columns - rank % columns
        step = 0.6 * _cell(rows, columns, closed=True)
        if rows > 2 and right == 0 and abs(down) == rows - 1:
            return 1j * math.copysign(step, down)
        if columns > 2 and down == 0 and abs(right) == columns - 1:
            return complex(-math.copysign(step, right))
        return None


def layout_of(topology: Topology) -> Layout:
    """Return where the ranks of a topology stand: on a circle, or as the family's own graph is best seen.

    A schedule of several phases stands as its last one does.
    """
    repeated = topology.phases[-1].topology
    make = _LAYOUTS.get(repeated.name, _circle) if repeated.registered else _circle
    return make(repeated) if topology.world_size > 1 else Layout(np.zeros((1, 2)))


def _circle(topology: Topology) -> Layout:
    """Clockwise, rank 0 on top."""
    return Layout(_on_circle(np.arange(topology.world_size) / topology.world_size), is_circle=True)


def _nodes(topology: Topology) -> Layout:
    """A circle with a gap between nodes of ``local_size`` ranks, node 0 on top."""
    local_size = int(topology.options["local_size"])
    ranks = np.arange(topology.world_size)
    gap = 0.0 if local_size in (1, topology.world_size) else 0.8
    slots = ranks + gap * (ranks // local_size)
    around = topology.world_size + gap * (topology.world_size // local_size)
    return Layout(_on_circle((slots - (local_size - 1) / 2 * (gap > 0)) / around), is_circle=True)


def _arc(topology: Topology) -> Layout:
    """A circle that is open at the bottom: its ends are not neighbours."""
    ends = 0.42
    return Layout(_on_circle(np.linspace(-ends, ends, topology.world_size)), is_circle=True)


def _star(topology: Topology) -> Layout:
    """Rank 0 in the middle."""
    leaves = topology.world_size - 1
    return Layout(np.concatenate((np.zeros((1, 2)), _on_circle(np.arange(leaves) / leaves))))


def _lattice(topology: Topology) -> Layout:
    """Row by row from the top left; what is one line only stands on an arc, or closed on a circle."""
    rows, columns = topology.options["shape"]
    closed = topology.name == "torus"
    if 1 in (rows, columns):
        return _circle(topology) if closed else _arc(topology)
    row, column = np.divmod(np.arange(rows * columns), columns)
    places = np.stack((column - (columns - 1) / 2, (rows - 1) / 2 - row), axis=1)
    return Layout(_cell(rows, columns, closed=closed) * places, closed_shape=(rows, columns) if closed else None)


def _as_its_graph(topology: Topology) -> Layout:
    """Return the layout of the family that the option ``graph`` names, or of its graph."""
    graph = topology.options["graph"]
    named = isinstance(graph, str) and graph in available()
    return layout_of(build(graph, topology.world_size)) if named else _springs(topology)


def _springs(topology: Topology) -> Layout:
    """Distances as in the graph: Kamada and Kawai, "An algorithm for drawing general undirected graphs", 1989."""
    n = topology.world_size
    graph = nx.empty_graph(n)
    if isinstance(topology.options.get("graph"), Mapping):
        graph.add_edges_from((edge["source"], edge["target"]) for edge in topology.options["graph"]["edges"])
    else:
        for round_ in distinct_rounds(topology, warmup=False):
            graph.add_edges_from((i, j) for i in range(n) for j in round_.neighbours(i))
    start = dict(enumerate(_on_circle(np.arange(n) / n).tolist()))
    found = nx.kamada_kawai_layout(graph, pos=start, weight=None)
    places = np.array([found[rank] for rank in range(n)])
    places = _into_square(_apart(_into_square(places), 1.1 / math.sqrt(n)))
    # The last digits depend on the processor; a picture must not.
    return Layout(places.round(3))


_LAYOUTS: dict[str, Callable[[Topology], Layout]] = {
    **dict.fromkeys(("alternating_exp_ring", "local_global"), _nodes),
    **dict.fromkeys(("graph", "matcha", "matchings"), _as_its_graph),
    **dict.fromkeys(("grid", "torus"), _lattice),
    **dict.fromkeys(("barabasi_albert", "erdos_renyi", "margulis", "random_regular"), _springs),
    **dict.fromkeys(("davis", "florentine", "karate_club", "les_miserables"), _springs),
    "path": _arc,
    "star": _star,
}


def _on_circle(turns: FloatArray) -> FloatArray:
    return np.stack((np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)), axis=1)


def _cell(rows: int, columns: int, *, closed: bool) -> float:
    """Return the distance of neighbours; the ways out of a closed lattice need a cell more."""
    return 2.0 / (max(rows, columns) - 1 + closed)


def _into_square(places: FloatArray) -> FloatArray:
    low, high = places.min(axis=0), places.max(axis=0)
    scale = 2.0 / max(float((high - low).max()), 1e-9)
    return np.asarray((places - (low + high) / 2) * scale)


def _apart(places: FloatArray, distance: float) -> FloatArray:
    """Push places apart that are nearer to each other than ``distance``."""
    for _ in range(60):
        between = places[:, None] - places
        lengths = np.linalg.norm(between, axis=2)
        np.fill_diagonal(lengths, np.inf)
        missing = np.maximum(distance - lengths, 0.0) / 2
        places = places + (between * (missing / np.maximum(lengths, 1e-9))[:, :, None]).sum(axis=1)
    return places

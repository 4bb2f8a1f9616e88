"""One round as a graph: ranks as discs, what they send to each other as lines. Points are complex numbers, x + iy.

And where ranks stand in a picture. A family that is no circle has a line in the table ``_LAYOUTS``.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from topologies.analysis.connectivity import distinct_rounds
from topologies.matrix_storage import FloatArray
from topologies.round import Round
from topologies.topology import Topology, available, build

_LARGEST_RADIUS = 0.12
#: Radius of a rank as a share of the distance to the nearest one: many need the place for their numbers.
_RADIUS_SHARE, _RADIUS_SHARE_OF_MANY, _MANY = 0.34, 0.42, 24
#: What a panel shows of the plane: -EXTENT .. EXTENT.
EXTENT = 1.14

_COLOURS = ("#2f6db3", "#b85a14", "#1b7f48", "#b8352a", "#7a55a8", "#86592f", "#c2498f", "#12808e")
_ALONE = "#737b84"
_LARGEST_FONT = 9.0


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


class _Edge(NamedTuple):
    source: int
    target: int
    weight: float
    #: "both" (equal weights, one line for the two), "one of two" or "alone".
    style: str


class _Line(NamedTuple):
    """A line that bends as a quadratic Bezier curve, with an arrow head at its end or without."""

    start: complex
    control: complex
    stop: complex
    has_head: bool


def draw_round(axes: Any, round_: Round, layout: Layout, *, side: float) -> None:
    """Draw one round, as ``topologies.draw`` describes it, into a square panel of matplotlib, ``side`` points wide."""
    from matplotlib.patches import Circle

    axes.set_xlim(-EXTENT, EXTENT)
    axes.set_ylim(-EXTENT, EXTENT)
    radius = layout.radius
    points = radius * side / (2 * EXTENT)
    colours = [_ALONE] * round_.world_size
    for number, group in enumerate(group for group in round_.groups if len(group) > 1):
        for rank in group:
            colours[rank] = _COLOURS[number % len(_COLOURS)]
    edges = list(_edges(round_))
    # Many lines cross in the middle: they get thinner and lighter together.
    crowd = min(1.0, (1.5 * round_.world_size / max(len(edges), 1)) ** 0.5)
    thickest = min(2.4, max(0.4, 0.3 * points)) * crowd
    heaviest = max((abs(edge.weight) for edge in edges), default=1.0)
    by_pen: dict[tuple[str, float, bool], list[_Line]] = defaultdict(list)  # one path each keeps a picture small
    for edge in edges:
        width = round(thickest * (0.15 + 0.85 * abs(edge.weight) / heaviest), 2)
        by_pen[colours[edge.target], width, edge.weight < 0].extend(_lines(edge, layout))
    for (colour, width, dashed), lines in by_pen.items():
        curves: list[complex] = []
        heads: list[complex] = []
        for line in lines:
            stop = line.stop
            if line.has_head:
                stop, head = _head(line, length=min(0.09, 1.1 * radius))
                heads.extend(head)
            curves.extend((line.start, line.control, stop))
        opacity = 0.35 + 0.55 * crowd
        dashes = (0, (3, 2)) if dashed else "-"
        style = {"facecolor": "none", "edgecolor": colour, "linewidth": width, "linestyle": dashes, "capstyle": "butt"}
        _add_path(axes, curves, ("MOVETO", "CURVE3", "CURVE3"), **style, alpha=opacity, zorder=1)
        style = {"facecolor": colour, "edgecolor": "none", "alpha": min(1.0, opacity + 0.2), "zorder": 2}
        _add_path(axes, heads, ("MOVETO", "LINETO", "LINETO", "CLOSEPOLY"), **style)
    style = {"ha": "center", "va": "center_baseline", "fontsize": min(_LARGEST_FONT, 1.12 * points), "color": "white"}
    for rank, (place, colour) in enumerate(zip(layout.places.tolist(), colours, strict=True)):
        axes.add_artist(Circle(place, radius, facecolor=colour, edgecolor="white", linewidth=0.5, zorder=3))
        axes.text(*place, str(rank), zorder=4, clip_on=False, **style)


def caption(round_: Round) -> str:
    """Return in a few words what a round does."""
    if round_.is_identity:
        return "nothing is sent"
    if round_.uniform_groups is not None:
        sizes = sorted({len(group) for group in round_.groups if len(group) > 1})
        return f"groups of {' and '.join(map(str, sizes)) if len(sizes) < 4 else f'{sizes[0]} to {sizes[-1]}'}"
    weights = round_.edges()[2]
    low, high = weights.min(), weights.max()
    return f"weights {low:.3g}" if math.isclose(low, high) else f"weights {low:.3g} to {high:.3g}"


def _edges(round_: Round) -> Iterator[_Edge]:
    rows = [round_.neighbours(rank) for rank in range(round_.world_size)]
    for target, row in enumerate(rows):
        for source, weight in row.items():
            if (back := rows[source].get(target)) is None:
                yield _Edge(source, target, weight, "alone")
            elif not math.isclose(back, weight):
                yield _Edge(source, target, weight, "one of two")
            elif source < target:
                yield _Edge(source, target, weight, "both")


def _lines(edge: _Edge, layout: Layout) -> list[_Line]:
    """Return the line of an edge, or its two ends where it goes around a torus."""
    start, stop = (complex(*layout.places[rank]) for rank in (edge.source, edge.target))
    out, back = layout.way_out(edge.source, edge.target), layout.way_out(edge.target, edge.source)
    radius, has_head = layout.radius, edge.style != "both"
    if out is not None and back is not None:
        left, entered = _towards(start, start + out, radius), _towards(stop, stop + back, radius)
        return [
            _Line(left, (left + start + out) / 2, start + out, has_head=False),
            _Line(stop + back, (stop + back + entered) / 2, entered, has_head),
        ]
    along = stop - start
    bend = 0.12 if edge.style == "one of two" else 0.0  # seen along it: the line back goes to the other side
    if layout.is_circle:  # short lines bend inwards
        outwards = ((start + stop).conjugate() * along).imag
        bend += math.copysign(0.25 * (1.0 - abs(along) / 2.0), -outwards)
    control = (start + stop) / 2 - 1j * bend * along
    return [_Line(_towards(start, control, radius), control, _towards(stop, control, radius), has_head)]


def _towards(start: complex, stop: complex, distance: float) -> complex:
    return start + distance * (stop - start) / abs(stop - start)


def _head(line: _Line, *, length: float) -> tuple[complex, tuple[complex, ...]]:
    """Return where the line ends under its arrow head, and the corners of the head, back to the first."""
    direction = line.stop - line.control
    along = direction / abs(direction) * min(length, 0.8 * abs(line.stop - line.start))
    base, across = line.stop - along, 0.38j * along
    return line.stop - 0.7 * along, (line.stop, base + across, base - across, line.stop)


def _add_path(axes: Any, points: Sequence[complex], codes: Sequence[str], **style: Any) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if points:
        vertices = np.array(points).view(np.float64).reshape(-1, 2)
        axes.add_artist(
            PathPatch(Path(vertices, [getattr(Path, code) for code in codes] * (len(points) // len(codes))), **style)
        )

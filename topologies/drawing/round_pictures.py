"""One round as a graph: ranks as discs, what they send to each other as lines. Points are complex numbers, x + iy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from topologies.drawing.layouts import Layout
    from topologies.round import Round

#: What a panel shows of the plane: -EXTENT .. EXTENT.
EXTENT = 1.14

_COLOURS = ("#2f6db3", "#b85a14", "#1b7f48", "#b8352a", "#7a55a8", "#86592f", "#c2498f", "#12808e")
_ALONE = "#737b84"
_LARGEST_FONT = 9.0


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
            back = rows[source].get(target)
            if back is None:
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

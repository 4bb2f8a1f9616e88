"""One round as a graph: ranks as discs, what they send to each other as lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
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

_Point = tuple[float, float]


class _Line(NamedTuple):
    """A line that bends as a quadratic Bezier curve, with an arrow head at its end or without."""

    start: _Point
    control: _Point
    stop: _Point
    has_head: bool


class _Pen(NamedTuple):
    colour: str
    width: float
    dashed: bool


def draw_round(axes: Any, round_: Round, layout: Layout, *, side: float) -> None:
    """Draw one round into a square panel.

    Every group has a colour, a rank that is alone is grey. The width of a line is its weight, a dashed one is
    negative. An arrow points to the rank that reads; a line without one has the same weight in both directions.

    Parameters
    ----------
    axes
        Of matplotlib; cleared of its frame.
    side
        Width and height of the panel in points.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    axes.set_axis_off()
    axes.set_xlim(-EXTENT, EXTENT)
    axes.set_ylim(-EXTENT, EXTENT)
    radius = layout.radius
    points = radius * side / (2 * EXTENT)
    colour_of = _colours(round_)
    edges = list(_edges(round_))
    # Many lines cross in the middle: they get thinner and lighter together.
    crowd = min(1.0, (1.5 * round_.world_size / max(len(edges), 1)) ** 0.5)
    for pen, lines in _by_pen(edges, layout, colour_of, thickest=min(2.4, max(0.4, 0.3 * points)) * crowd).items():
        vertices: list[_Point] = []
        codes: list[Any] = []
        heads: list[_Point] = []
        for line in lines:
            stop = line.stop
            if line.has_head:
                stop, head = _head(line, length=min(0.09, 1.1 * radius))
                heads.extend((*head, head[0]))
            vertices.extend((line.start, line.control, stop))
            codes.extend((Path.MOVETO, Path.CURVE3, Path.CURVE3))
        opacity = 0.35 + 0.55 * crowd
        axes.add_artist(
            PathPatch(
                Path(vertices, codes),
                facecolor="none",
                edgecolor=pen.colour,
                linewidth=pen.width,
                linestyle=(0, (3, 2)) if pen.dashed else "-",
                capstyle="butt",
                alpha=opacity,
                zorder=1,
            )
        )
        if heads:
            triangles = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(heads) // 4)
            axes.add_artist(
                PathPatch(
                    Path(heads, triangles),
                    facecolor=pen.colour,
                    edgecolor="none",
                    alpha=min(1.0, opacity + 0.2),
                    zorder=2,
                )
            )
    _draw_ranks(axes, layout, colour_of, font_size=min(_LARGEST_FONT, 1.12 * points))


def caption(round_: Round) -> str:
    """Return in a few words what a round does."""
    if round_.is_identity:
        return "nothing is sent"
    if round_.uniform_groups is not None:
        sizes = sorted({len(group) for group in round_.groups if len(group) > 1})
        return (
            "groups of " + " and ".join(map(str, sizes)) if len(sizes) < 4 else f"groups of {sizes[0]} to {sizes[-1]}"
        )
    weights = [weight for *_, weight, _ in _edges(round_)]
    low, high = min(weights), max(weights)
    return f"weights {low:.3g}" if math.isclose(low, high) else f"weights {low:.3g} to {high:.3g}"


def is_directed(round_: Round) -> bool:
    """Whether some line of the round has an arrow head."""
    return any(style != "both" for *_, style in _edges(round_))


def has_negative_weights(round_: Round) -> bool:
    """Whether a rank gives a negative weight to another one or to itself."""
    negative = any(weight < 0 for *_, weight, _ in _edges(round_))
    return negative or any(round_.self_weight(rank) < 0 for rank in range(round_.world_size))


def _draw_ranks(axes: Any, layout: Layout, colour_of: list[str], *, font_size: float) -> None:
    from matplotlib.patches import Circle

    for rank, (x, y) in enumerate(layout.places.tolist()):
        colour = colour_of[rank]
        axes.add_artist(Circle((x, y), layout.radius, facecolor=colour, edgecolor="white", linewidth=0.5, zorder=3))
        axes.text(
            x,
            y,
            str(rank),
            ha="center",
            va="center_baseline",
            fontsize=font_size,
            color="white",
            zorder=4,
            clip_on=False,
        )


def _colours(round_: Round) -> list[str]:
    """Return the colour of every rank; groups that follow each other differ."""
    colours = [_ALONE] * round_.world_size
    together = [group for group in round_.groups if len(group) > 1]
    for number, group in enumerate(together):
        for rank in group:
            colours[rank] = _COLOURS[number % len(_COLOURS)]
    return colours


def _edges(round_: Round) -> Iterator[tuple[int, int, float, str]]:
    """Yield source, target, weight and style: "both" (equal weights, yielded once), "one of two" or "alone"."""
    rows = [round_.neighbours(rank) for rank in range(round_.world_size)]
    for target, row in enumerate(rows):
        for source, weight in row.items():
            back = rows[source].get(target)
            if back is None:
                yield source, target, weight, "alone"
            elif not math.isclose(back, weight):
                yield source, target, weight, "one of two"
            elif source < target:
                yield source, target, weight, "both"


def _by_pen(
    edges: list[tuple[int, int, float, str]], layout: Layout, colour_of: list[str], *, thickest: float
) -> dict[_Pen, list[_Line]]:
    """Return the lines by colour and width: one path for each pen keeps a picture small."""
    heaviest = max((abs(weight) for *_, weight, _ in edges), default=1.0)
    lines: dict[_Pen, list[_Line]] = defaultdict(list)
    for source, target, weight, style in edges:
        width = round(thickest * (0.15 + 0.85 * abs(weight) / heaviest), 2)
        pen = _Pen(colour_of[target], width, weight < 0)
        lines[pen].extend(_lines(source, target, layout, style))
    return lines


def _lines(source: int, target: int, layout: Layout, style: str) -> list[_Line]:
    """Return the line from ``source`` to ``target``, or its two ends where it goes around a torus."""
    start, stop = _point(layout, source), _point(layout, target)
    out, back = layout.way_out(source, target), layout.way_out(target, source)
    if out is not None and back is not None:
        left, entered = _plus(start, out), _plus(stop, back)
        radius = layout.radius
        return [
            _straight(_towards(start, left, radius), left, has_head=False),
            _straight(entered, _towards(stop, entered, radius), has_head=style != "both"),
        ]
    bend = _bend(start, stop) if layout.is_circle else 0.0
    if style == "one of two":
        bend += 0.12  # seen along its direction: the line back goes to the other side
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    control = ((start[0] + stop[0]) / 2 + bend * dy, (start[1] + stop[1]) / 2 - bend * dx)
    ends = _towards(start, control, layout.radius), _towards(stop, control, layout.radius)
    return [_Line(ends[0], control, ends[1], style != "both")]


def _straight(start: _Point, stop: _Point, *, has_head: bool) -> _Line:
    return _Line(start, ((start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2), stop, has_head)


def _bend(start: _Point, stop: _Point) -> float:
    """Return the curvature of a line on a circle: short ones bend inwards."""
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    outwards = (start[0] + stop[0]) * dy - (start[1] + stop[1]) * dx
    return math.copysign(0.25 * (1.0 - math.hypot(dx, dy) / 2.0), -outwards)


def _head(line: _Line, *, length: float) -> tuple[_Point, tuple[_Point, _Point, _Point]]:
    """Return where the line ends under its arrow head, and the corners of the head."""
    x, y = line.stop
    dx, dy = x - line.control[0], y - line.control[1]
    size = min(length, 0.8 * math.hypot(x - line.start[0], y - line.start[1])) / math.hypot(dx, dy)
    along, across = (dx * size, dy * size), (-0.38 * dy * size, 0.38 * dx * size)
    base = x - along[0], y - along[1]
    head = ((x, y), (base[0] + across[0], base[1] + across[1]), (base[0] - across[0], base[1] - across[1]))
    return (x - 0.7 * along[0], y - 0.7 * along[1]), head


def _point(layout: Layout, rank: int) -> _Point:
    x, y = layout.places[rank]
    return float(x), float(y)


def _plus(one: _Point, other: _Point) -> _Point:
    return one[0] + other[0], one[1] + other[1]


def _towards(start: _Point, stop: _Point, distance: float) -> _Point:
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    share = distance / float(np.hypot(dx, dy))
    return start[0] + share * dx, start[1] + share * dy

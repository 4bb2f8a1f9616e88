"""Pictures of topologies: rounds side by side, ranks on a circle."""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topologies.validation import check_integer

if TYPE_CHECKING:
    from topologies.round import Round
    from topologies.topology import Topology

#: A circle of more ranks shows nothing.
MAX_DRAWN_WORLD_SIZE = 128

_MAX_COLUMNS = 4
_TITLE_CHARACTERS_PER_INCH = 11
_MAX_ROUNDS = 8
_APERIODIC_ROUNDS = 4
_COLOURS = ("#3366aa", "#dd7722", "#2a9d5c", "#c0392b", "#7d5ba6", "#8c6239", "#d667a5", "#1f9aa8")
_ALONE = "#b8b8b8"

_Point = tuple[float, float]


def draw(topology: Topology, path: str | os.PathLike[str], rounds: int | None = None) -> None:
    """Write a picture of rounds of a topology.

    Ranks stand clockwise on a circle, rank 0 on top. Every group has a colour, a rank that is alone is grey; the
    width of a line is its weight. An arrow points to the rank that reads; a line without one has the same weight in
    both directions. The same topology gives the same SVG, byte for byte, under one version of matplotlib.

    Parameters
    ----------
    topology
        At most 128 ranks; readable up to 64.
    path
        Where to write; the suffix .svg or .png decides the format.
    rounds
        How many, from round 0 on; by default one period, but at most 8, and 4 without a period. Of a topology made
        by :meth:`Topology.every` or :meth:`Topology.then` by default the exchanges, those of the warm-up included.

    Raises
    ------
    ValueError
        If the suffix is another, ``rounds`` is not positive or there are too many ranks.
    ImportError
        If matplotlib is missing.
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"path must end in .svg or .png, got {str(path)!r}; change the suffix")
    if topology.world_size > MAX_DRAWN_WORLD_SIZE:
        raise ValueError(
            f"a picture shows at most {MAX_DRAWN_WORLD_SIZE} ranks, the topology has {topology.world_size}; draw "
            f"the same family with fewer"
        )
    numbers = _exchanges(topology) if rounds is None else range(check_integer("rounds", rounds, minimum=1))
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib; install it with pip install "gossip-training[plot]"') from error

    num_columns = min(len(numbers), _MAX_COLUMNS)
    num_lines = math.ceil(len(numbers) / num_columns)
    side = 2.6 if topology.world_size <= 16 else 3.4 if topology.world_size <= 32 else 4.8
    # The hash salt and the missing date make the file the same every time.
    with matplotlib.rc_context({"svg.hashsalt": "topologies", "font.family": "DejaVu Sans"}):
        width = max(side * num_columns, 3.6)
        title = textwrap.fill(_title(topology, numbers), int(width * _TITLE_CHARACTERS_PER_INCH))
        height = (side + 0.35) * num_lines + 0.3 + 0.2 * len(title.splitlines())
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, fontsize=11)
        panels = figure.subplots(num_lines, num_columns, squeeze=False).flat
        for t, axes in itertools.zip_longest(numbers, panels):
            axes.set_axis_off()
            if t is not None:
                _draw_round(axes, topology.round(t), t)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _exchanges(topology: Topology) -> list[int]:
    """Return the numbers of the first rounds in which something new is exchanged, some of every phase."""
    at_most = max(1, _MAX_ROUNDS // len(topology.phases))
    numbers = [
        phase.number_of(exchange)
        for phase in topology.phases
        for exchange in range(min(phase.num_distinct(sampled=_APERIODIC_ROUNDS), at_most))
    ]
    return numbers[:_MAX_ROUNDS]


def _title(topology: Topology, numbers: Sequence[int]) -> str:
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    num_rounds = numbers[-1] + 1
    if topology.warmup:
        shown = f"{f'period {topology.period}' if topology.period else 'no period'} after {topology.warmup} rounds"
    elif topology.period is None:
        shown = f"first {num_rounds} rounds"
    elif num_rounds < topology.period:
        shown = f"first {num_rounds} of {topology.period} rounds"
    else:
        shown = f"period {topology.period}"
    return f"{topology.name}, {ranks}, {shown}"


def _draw_round(axes: Any, round_: Round, t: int) -> None:
    from matplotlib.patches import Circle, FancyArrowPatch

    n = round_.world_size
    radius = min(0.11, 0.7 * math.sin(math.pi / max(n, 2)))
    places = [(math.sin(2 * math.pi * rank / n), math.cos(2 * math.pi * rank / n)) for rank in range(n)]
    colour_of = _colours(round_)
    edges = list(_edges(round_))
    heaviest = max((abs(weight) for *_, weight, _ in edges), default=1.0)
    # Many lines cross in the middle: they get thinner and lighter together.
    crowd = min(1.0, (1.5 * n / max(len(edges), 1)) ** 0.5)
    for source, target, weight, style in edges:
        bend = _bend(places[source], places[target], is_side=(source - target) % n in (1, n - 1))
        if style == "one of two":
            bend += 0.12  # seen along its direction: the line back goes to the other side
        start, stop = _between(places[source], places[target], bend, radius)
        axes.add_patch(
            FancyArrowPatch(
                start,
                stop,
                arrowstyle="-" if style == "both" else "-|>",
                connectionstyle=f"arc3,rad={bend:.4f}",
                mutation_scale=max(3.0, 75 * radius),
                shrinkA=0,
                shrinkB=0,
                linewidth=(0.2 + 1.6 * abs(weight) / heaviest) * crowd * (0.4 + 5.5 * radius),
                color=colour_of[target],
                alpha=0.25 + 0.6 * crowd,
                zorder=1,
            )
        )
    for rank, (x, y) in enumerate(places):
        axes.add_patch(Circle((x, y), radius, facecolor=colour_of[rank], edgecolor="white", linewidth=0.5, zorder=2))
        axes.text(
            x,
            y,
            str(rank),
            ha="center",
            va="center_baseline",
            fontsize=min(8.0, 80 * radius),
            color="white",
            zorder=3,
        )
    axes.set_xlim(-1.2, 1.2)
    axes.set_ylim(-1.2, 1.2)
    axes.set_aspect("equal")
    axes.set_title(f"round {t}: {_caption(round_)}", fontsize=8)


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


def _bend(start: _Point, stop: _Point, *, is_side: bool) -> float:
    """Return the curvature of a line: short ones bend inwards, so that they pass the ranks between their ends."""
    if is_side:
        return 0.0
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    outwards = (start[0] + stop[0]) * dy - (start[1] + stop[1]) * dx
    return math.copysign(0.25 * (1.0 - math.hypot(dx, dy) / 2.0), -outwards)


def _between(start: _Point, stop: _Point, bend: float, radius: float) -> tuple[_Point, _Point]:
    """Return where a line that bends as matplotlib's arc3 leaves one circle and meets the other."""
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    control = ((start[0] + stop[0]) / 2 + bend * dy, (start[1] + stop[1]) / 2 - bend * dx)
    return _towards(start, control, radius), _towards(stop, control, radius)


def _towards(start: _Point, stop: _Point, distance: float) -> _Point:
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    share = distance / math.hypot(dx, dy)
    return start[0] + share * dx, start[1] + share * dy


def _caption(round_: Round) -> str:
    if round_.is_identity:
        return "nothing is sent"
    if round_.uniform_groups is not None:
        sizes = sorted({len(group) for group in round_.groups if len(group) > 1})
        return "groups of " + " and ".join(map(str, sizes))
    weights = [weight for rank in range(round_.world_size) for weight in round_.neighbours(rank).values()]
    if math.isclose(min(weights), max(weights)):
        return f"weights {weights[0]:.3g}"
    return f"weights {min(weights):.3g} to {max(weights):.3g}"

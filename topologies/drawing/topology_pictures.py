"""Whole pictures: which rounds, matrices and curve, and where each stands."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topologies.analysis import product
from topologies.analysis.description import count
from topologies.drawing.layouts import layout_of
from topologies.drawing.mixing_panels import FAINT, FONT, INK, draw_curve, draw_matrix
from topologies.drawing.picture_files import output_path, save, settings
from topologies.drawing.round_pictures import caption, draw_round
from topologies.schedule import title
from topologies.validation import check_integer

if TYPE_CHECKING:
    from topologies.drawing.layouts import Layout
    from topologies.topology import Topology

#: Of more ranks only matrices and the curve are drawn: lines between them show nothing.
MAX_RANKS_WITH_LINES = 80
#: Of more ranks there is no picture: matrices of them are dense.
MAX_DRAWN_WORLD_SIZE = 1024
#: More rounds make no picture.
MAX_DRAWN_ROUNDS = 32

_APERIODIC_ROUNDS = 4

#: Inches: the width, and the heights of a line of the title, of one below it, of a caption, and of a row of panels.
_WIDTH = 9.6
_TITLE_LINE, _LINE, _CAPTION, _PANELS = 0.24, 0.2, 0.28, 2.7
_AROUND_PANELS = {"left": 0.55, "right": 0.2, "top": 0.35, "bottom": 0.45, "wspace": 0.45, "hspace": 0.45}
_POINTS_PER_INCH = 72


def draw(topology: Topology, path: str | os.PathLike[str], rounds: int | None = None) -> None:
    """Write a picture of a topology: its rounds, their mixing matrices, and how fast they mix.

    Ranks stand clockwise on a circle, rank 0 on top, or as their graph is best seen: see
    ``topologies.drawing.layout_of``. Every group has a colour, a rank that is alone is grey; the width of a line
    is its weight, a dashed one is negative. An arrow points to the rank that reads; a line without one has the same
    weight in both directions. Beside or below them stand W of the first round drawn, the product of a period, and
    the curve of ``||W_(k-1) .. W_0 - J||_2`` over k rounds, after the warm-up if there is one. Of more than 80
    ranks there are only matrices and the curve. The same topology gives the same SVG, byte for byte, under one version
    of matplotlib.

    Parameters
    ----------
    topology
        At most 1024 ranks; readable up to 64.
    path
        Where to write; the suffix .svg or .png decides the format.
    rounds
        How many, from round 0 on, at most 32; by default one period, but at most 8, and 4 without a period. Of a
        topology made by :meth:`Topology.every` or :meth:`Topology.then` by default the exchanges, those of the
        warm-up included.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    """
    path = output_path(path)
    _check_world_size(topology)
    if rounds is None:
        numbers: Sequence[int] = _exchanges(topology, 8)
    else:
        numbers = range(check_integer("rounds", rounds, minimum=1, maximum=MAX_DRAWN_ROUNDS))
    with settings("path"):
        save(_whole_figure(topology, numbers), path)


def draw_compact(topology: Topology) -> str:
    """Return a small picture as SVG for a page: at most three rounds, one matrix and the curve. Text is text."""
    _check_world_size(topology)
    with settings("none"):
        text = io.StringIO()
        _compact_figure(topology).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _whole_figure(topology: Topology, numbers: Sequence[int]) -> Any:
    """Return the figure: rounds in lines and what they do below them, or one round with that beside it."""
    from matplotlib.figure import Figure

    n = topology.world_size
    layout = layout_of(topology) if n <= MAX_RANKS_WITH_LINES else None
    matrices = _matrices(topology, numbers, with_lines=layout is not None)
    title_lines = textwrap.wrap(title(topology.name, topology.options), 88)
    lines = textwrap.wrap(_subtitle(topology, numbers), 125)
    if layout is not None:
        lines.append(_legend(topology, numbers, layout))
    header = _TITLE_LINE * len(title_lines) + _LINE * len(lines) + 0.25
    num_rows = -(-(len(matrices) + 1) // 3)
    side = 2.35 if n <= 16 else 3.1 if n <= 32 else 4.65
    beside = layout is not None and len(numbers) == 1
    columns = min(len(numbers), int(_WIDTH // side))
    rounds = (side + _CAPTION) * -(-len(numbers) // columns) if layout is not None and not beside else 0.0
    body = max(_PANELS * num_rows, side + _CAPTION) if beside else _PANELS * num_rows

    panels_width = 6.4 if beside else _WIDTH
    figure: Any = Figure(figsize=(panels_width + side * beside, header + rounds + body))
    ratios = [part for part in (header, rounds, body) if part]
    head, *parts = figure.subfigures(len(ratios), 1, height_ratios=ratios)
    style = {"x": 0.15 / figure.get_figwidth(), "va": "top"}
    head.text(y=1 - 0.12 / header, s="\n".join(title_lines), fontsize=11.5, color=INK, weight="bold", **style)
    below = 0.12 + _TITLE_LINE * len(title_lines)
    head.text(y=1 - below / header, s="\n".join(lines), fontsize=8.5, color=FAINT, linespacing=1.5, **style)
    panels = parts[-1]
    if layout is not None:
        if beside:
            parts[0], panels = panels.subfigures(1, 2, width_ratios=(side, panels_width))
        _draw_rounds(parts[0], topology, numbers, layout, columns, side, font_size=8.0)
    axes = _grid(panels, num_rows, 3 if len(matrices) > 1 else 2, **_AROUND_PANELS)
    for (matrix, matrix_title), panel in zip(matrices, axes, strict=False):
        draw_matrix(panel, matrix, matrix_title)
    at_most = 64 if layout is not None else 16  # of many ranks each exchange costs a dense product
    draw_curve(axes[len(matrices)], topology, at_most=at_most)
    for unused in axes[len(matrices) + 1 :]:
        unused.remove()
    return figure


def _compact_figure(topology: Topology) -> Any:
    """Return the figure: one round beside its matrix, or rounds above it, and the curve."""
    from matplotlib.figure import Figure

    width = 4.7
    numbers = _exchanges(topology, 3)
    layout = layout_of(topology) if topology.world_size <= MAX_RANKS_WITH_LINES else None
    matrix, matrix_title = _matrices(topology, numbers, with_lines=layout is not None)[-1]
    beside = layout is not None and len(numbers) == 1
    side = 2.15 if beside else min(0.95 * width / len(numbers), 2.2)
    above = side + 1.5 * _CAPTION if layout is not None else 0.0
    figure: Any = Figure(figsize=(width, above + (1.4 if beside else 2.1)))
    panels = figure
    if layout is not None:
        upper, panels = figure.subfigures(2, 1, height_ratios=(above, figure.get_figheight() - above))
        rounds, aside = upper.subfigures(1, 2) if beside else (upper, upper)
        _draw_rounds(rounds, topology, numbers, layout, len(numbers), side, font_size=FONT, separator="\n")
    if beside:
        (first,), (curve,) = _grid(aside, 1, 1, 0.5, 0.6, 0.35, 0.45), _grid(panels, 1, 1, **_AROUND_PANELS)
    else:
        first, curve = _grid(panels, 1, 2, **_AROUND_PANELS | {"wspace": 0.6})
    draw_matrix(first, matrix, matrix_title)
    draw_curve(curve, topology, at_most=32, title="share of a disagreement left")
    return figure


def _grid(
    figure: Any, rows: int, columns: int, left: float, right: float, top: float, bottom: float, **space: float
) -> Any:
    """Return panels in rows, with so many inches around them; ``space`` between them as gridspecs take it."""
    # Not by a layout engine: its last digits, and with them the bytes of a picture, are others every time.
    width, height = figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi
    edges = {"left": left / width, "right": 1 - right / width, "top": 1 - top / height, "bottom": bottom / height}
    return figure.subplots(rows, columns, squeeze=False, gridspec_kw=edges | space).flatten()


def _draw_rounds(
    figure: Any, topology: Topology, numbers: Sequence[int], layout: Layout, columns: int, side: float, *,
    font_size: float, separator: str = ": ",
) -> None:  # fmt: skip
    """Draw rounds in lines of so many squares of ``side`` inches, each under its caption."""
    top = _CAPTION * (1.5 if separator == "\n" else 1.0)
    axes = _grid(
        figure, -(-len(numbers) // columns), columns, 0.05, 0.05, top, 0.02, wspace=0.05, hspace=_CAPTION / side
    )
    for panel in axes:
        panel.set_axis_off()
    for t, panel in zip(numbers, axes, strict=False):
        round_ = topology.round(t)
        panel.set_aspect("equal")
        panel.set_title(f"round {t}{separator}{caption(round_)}", fontsize=font_size, color=INK, pad=2)
        draw_round(panel, round_, layout, side=side * _POINTS_PER_INCH)


def _matrices(topology: Topology, numbers: Sequence[int], *, with_lines: bool) -> list[tuple[Any, str]]:
    """Return the matrices to show and their titles: of the first round, or rounds, and the product of a period."""
    shown = list(numbers[:1] if with_lines else numbers[:4])
    found = [(topology.round(t).matrix(), f"W of round {t}") for t in shown]
    last = topology.phases[-1].topology
    num_exchanges = last.period or min(len(numbers), _APERIODIC_ROUNDS)
    if num_exchanges > 1 or topology.warmup:
        what = "the period" if last.period else f"{num_exchanges} rounds"
        found.append((product(last, num_exchanges), f"product of {what}"))
    return found


def _exchanges(topology: Topology, at_most: int) -> list[int]:
    """Return the numbers of the first rounds in which something new is exchanged, some of every phase."""
    most_per_phase = max(1, at_most // len(topology.phases))
    numbers = [
        phase.number_of(exchange)
        for phase in topology.phases
        for exchange in range(min(phase.num_distinct(sampled=_APERIODIC_ROUNDS), most_per_phase))
    ]
    return numbers[:at_most] or [topology.phases[-1].number_of(0)]


def _subtitle(topology: Topology, numbers: Sequence[int]) -> str:
    num_rounds = numbers[-1] + 1
    period = f"period {topology.period}" if topology.period else "no period"
    if topology.warmup:
        period += f" after {topology.warmup} rounds"
    elif topology.period is None:
        period += f", first {count(num_rounds, 'round')}"
    elif num_rounds < topology.period:
        period = f"first {num_rounds} of {topology.period} rounds"
    return f"{count(topology.world_size, 'rank')}, {period}"


def _legend(topology: Topology, numbers: Sequence[int], layout: Layout) -> str:
    rounds = [topology.round(t) for t in numbers]
    parts = ["The thicker a line, the larger its weight"]
    if not all(round_.is_symmetric for round_ in rounds):
        parts.append("an arrow points to the rank that reads")
    if any(round_.smallest_weight < 0 for round_ in rounds):
        parts.append("dashed: negative")
    if layout.closed_shape is not None:
        parts.append("a line that leaves at one side comes back at the other")
    return "; ".join(parts) + "."


def _check_world_size(topology: Topology) -> None:
    if topology.world_size > MAX_DRAWN_WORLD_SIZE:
        raise ValueError(
            f"a picture shows at most {MAX_DRAWN_WORLD_SIZE} ranks, the topology has {topology.world_size}; draw "
            f"the same family with fewer"
        )

"""Whole pictures: which rounds, matrices and curve, and where each stands. Lengths are in inches, from the top left."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topologies.analysis import product
from topologies.drawing.layouts import layout_of
from topologies.drawing.mixing_panels import draw_curve, draw_matrix, horizon
from topologies.drawing.picture_files import picture_path, save, settings
from topologies.drawing.round_pictures import caption, draw_round, has_negative_weights, is_directed
from topologies.reports.family_samples import options_text
from topologies.validation import check_integer

if TYPE_CHECKING:
    from topologies.drawing.layouts import Layout
    from topologies.round import Round
    from topologies.topology import Topology

#: Of more ranks only matrices and the curve are drawn: lines between them show nothing.
MAX_RANKS_WITH_LINES = 80
#: Of more ranks there is no picture: matrices of them are dense.
MAX_DRAWN_WORLD_SIZE = 1024
#: More rounds make no picture.
MAX_DRAWN_ROUNDS = 32

_DEFAULT_ROUNDS = 8
_APERIODIC_ROUNDS = 4
_EXCHANGES_OF_THE_CURVE = 64
#: Of many ranks each exchange costs a dense product.
_EXCHANGES_OF_A_LARGE_CURVE = 16

_WIDTH = 9.6
_MARGIN = 0.15
_TITLE_LINE, _LINE = 0.24, 0.2
_MATRIX = 2.2
#: A matrix or the curve with what is written around it.
_PANEL_WIDTH, _PANEL_HEIGHT = 3.1, 2.85
_CAPTION, _CAPTION_LINE = 0.15, 0.13
_FONT = 7.5
_POINTS_PER_INCH = 72
_INK, _FAINT = "#1f2933", "#5f6b76"


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
    ValueError
        If the suffix is another, ``rounds`` is not 1 to 32 or there are too many ranks.
    ImportError
        If matplotlib is missing.
    """
    path = picture_path(path)
    _check_world_size(topology)
    if rounds is None:
        numbers: Sequence[int] = _exchanges(topology, _DEFAULT_ROUNDS)
    else:
        numbers = range(check_integer("rounds", rounds, minimum=1))
        if rounds > MAX_DRAWN_ROUNDS:
            raise ValueError(f"rounds must be at most {MAX_DRAWN_ROUNDS}, got {rounds}; draw fewer")
    with settings("path"):
        save(_whole_figure(topology, numbers), path)


def draw_compact(topology: Topology) -> str:
    """Return a small picture as SVG for a page: at most three rounds, one matrix and the curve. Text is text.

    Parameters
    ----------
    topology
        At most 1024 ranks.

    Raises
    ------
    ValueError
        If there are too many ranks.
    ImportError
        If matplotlib is missing.
    """
    _check_world_size(topology)
    with settings("none"):
        text = io.StringIO()
        _compact_figure(topology).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


class _Figure:
    """A figure of matplotlib that is filled with panels at places in inches from the top left."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width, height))
        self.size = width, height

    def panel(self, left: float, top: float, width: float, height: float) -> Any:
        across, down = self.size
        return self.figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))

    def text(self, left: float, top: float, text: str, size: float, **style: Any) -> None:
        across, down = self.size
        self.figure.text(left / across, 1 - top / down, text, fontsize=size, va="top", **{"color": _INK, **style})

    def round(
        self, number: int, round_: Round, layout: Layout, left: float, top: float, side: float, font_size: float,
        *, lines: int = 1,
    ) -> None:  # fmt: skip
        """Draw a round under a caption of one line or two; ``side`` is that of the square without it."""
        text = f"round {number}{': ' if lines == 1 else chr(10)}{caption(round_)}"
        self.text(left + side / 2, top + 0.06, text, font_size, ha="center", linespacing=1.15)
        axes = self.panel(left, top + _caption_height(lines), side, side)
        draw_round(axes, round_, layout, side=side * _POINTS_PER_INCH)

    def matrix(self, matrix: Any, title: str, left: float, top: float, side: float, font_size: float) -> None:
        scale = self.panel(left + 0.42 + side + 0.08, top + 0.3, 0.09, side)
        draw_matrix(self.panel(left + 0.42, top + 0.3, side, side), scale, matrix, title, font_size=font_size)


def _whole_figure(topology: Topology, numbers: Sequence[int]) -> Any:
    """Return the figure: rounds in lines and what they do below them, or one round with that beside it."""
    n = topology.world_size
    with_lines = n <= MAX_RANKS_WITH_LINES
    layout = layout_of(topology) if with_lines else None
    beside = layout is not None and len(numbers) == 1
    side = 2.35 if n <= 16 else 3.1 if n <= 32 else 4.65
    if beside:
        side = max(side, 3.3)
    columns = min(len(numbers), int(_WIDTH // side))
    rounds_height = (side + _caption_height(1)) * -(-len(numbers) // columns) if layout is not None else 0.0
    matrices = _matrices(topology, numbers, with_lines=with_lines)

    title = textwrap.wrap(_title(topology), 88)
    lines = textwrap.wrap(_subtitle(topology, numbers), 125)
    if layout is not None:
        lines.append(_legend(topology, numbers, layout))
    header = _MARGIN + _TITLE_LINE * len(title) + _LINE * len(lines) + 0.1
    panels_height = _PANEL_HEIGHT * -(-(len(matrices) + 1) // 3)
    body = max(rounds_height, panels_height) if beside else rounds_height + panels_height
    width = side + 2 * _PANEL_WIDTH if beside else _WIDTH
    picture = _Figure(width, header + body + _MARGIN)
    for number, line in enumerate(title):
        picture.text(_MARGIN, _MARGIN + _TITLE_LINE * number, line, 11.5, weight="bold")
    for number, line in enumerate(lines):
        picture.text(_MARGIN, _MARGIN + _TITLE_LINE * len(title) + _LINE * number, line, 8.5, color=_FAINT)

    if layout is not None:
        slot = side if beside else _WIDTH / columns
        for place, t in enumerate(numbers):
            row, column = divmod(place, columns)
            left = column * slot + (slot - side) / 2
            picture.round(t, topology.round(t), layout, left, header + row * (side + _caption_height(1)), side, 8.0)
    left, top = (side, header + (body - panels_height) / 2) if beside else (0.0, header + rounds_height)
    first_left = left
    for matrix, matrix_title in matrices:
        picture.matrix(matrix, matrix_title, left, top, _MATRIX, _FONT)
        left += _PANEL_WIDTH
        if left + _PANEL_WIDTH > width + 0.05:
            left, top = first_left, top + _PANEL_HEIGHT
    at_most = _EXCHANGES_OF_THE_CURVE if with_lines else _EXCHANGES_OF_A_LARGE_CURVE
    axes = picture.panel(left + 0.62, top + 0.3, width - left - 0.92, _MATRIX)
    draw_curve(axes, topology, num_exchanges=horizon(topology, at_most), font_size=_FONT)
    return picture.figure


def _compact_figure(topology: Topology) -> Any:
    """Return the figure: one round beside its matrix, or rounds above it, and the curve."""
    width, font_size, curve_title = 4.7, 7.5, "share of a disagreement left"
    with_lines = topology.world_size <= MAX_RANKS_WITH_LINES
    numbers = _exchanges(topology, 3)
    matrix, title = _matrices(topology, numbers, with_lines=with_lines)[-1]
    if with_lines and len(numbers) == 1:
        picture = _Figure(width, 4.15)
        picture.round(numbers[0], topology.round(numbers[0]), layout_of(topology), 0.0, 0.0, 2.15, font_size, lines=2)
        picture.matrix(matrix, title, 2.1, 0.3, 1.5, font_size)
        axes = picture.panel(0.65, 2.85, width - 0.85, 0.9)
    else:
        slot = width / len(numbers)
        side = min(0.95 * slot, 2.2)
        top = side + _caption_height(2) if with_lines else 0.0
        picture = _Figure(width, top + 2.2)
        if with_lines:
            layout = layout_of(topology)
            for place, t in enumerate(numbers):
                left = place * slot + (slot - side) / 2
                picture.round(t, topology.round(t), layout, left, 0.0, side, font_size, lines=2)
        picture.matrix(matrix, title, 0.0, top, 1.45, font_size)
        axes = picture.panel(2.96, top + 0.3, width - 3.16, 1.45)
    draw_curve(axes, topology, num_exchanges=horizon(topology, 32), font_size=font_size, title=curve_title)
    return picture.figure


def _matrices(topology: Topology, numbers: Sequence[int], *, with_lines: bool) -> list[tuple[Any, str]]:
    """Return the matrices to show and their titles: of the first round, or rounds, and the product of a period."""
    shown = list(numbers[:1] if with_lines else numbers[:4])
    found = [(topology.round(t).matrix(), f"W of round {t}") for t in shown]
    last = topology.phases[-1].topology
    num_exchanges = last.period or min(len(numbers), _APERIODIC_ROUNDS)
    if num_exchanges > 1 or topology.warmup:
        title = "product of the period" if last.period else f"product of {num_exchanges} rounds"
        found.append((product(last, num_exchanges), title))
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


def _caption_height(lines: int) -> float:
    return _CAPTION + _CAPTION_LINE * lines


def _title(topology: Topology) -> str:
    options = options_text(topology.options)
    return f"{topology.name} ({options})" if options else topology.name


def _subtitle(topology: Topology, numbers: Sequence[int]) -> str:
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    num_rounds = numbers[-1] + 1
    if topology.warmup:
        shown = f"{f'period {topology.period}' if topology.period else 'no period'} after {topology.warmup} rounds"
    elif topology.period is None:
        shown = f"no period, first {num_rounds} rounds" if num_rounds > 1 else "no period, first round"
    elif num_rounds < topology.period:
        shown = f"first {num_rounds} of {topology.period} rounds"
    else:
        shown = f"period {topology.period}"
    return f"{ranks}, {shown}"


def _legend(topology: Topology, numbers: Sequence[int], layout: Layout) -> str:
    """Return what the lines of these rounds mean."""
    rounds = [topology.round(t) for t in numbers]
    parts = ["the thicker a line, the larger its weight"]
    if any(is_directed(round_) for round_ in rounds):
        parts.append("an arrow points to the rank that reads")
    if any(has_negative_weights(round_) for round_ in rounds):
        parts.append("dashed: negative")
    if layout.closed_shape is not None:
        parts.append("a line that leaves at one side comes back at the other")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def _check_world_size(topology: Topology) -> None:
    if topology.world_size > MAX_DRAWN_WORLD_SIZE:
        raise ValueError(
            f"a picture shows at most {MAX_DRAWN_WORLD_SIZE} ranks, the topology has {topology.world_size}; draw "
            f"the same family with fewer"
        )

"""Whole pictures: which rounds, matrices and curve, and where each stands.

And panels about how a schedule mixes: a matrix as a heat map, and the distance to the mean over the rounds.
"""

import io
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from topologies.analysis import consensus_errors, product
from topologies.analysis.description import count
from topologies.analysis.disagreement import ROUNDING
from topologies.drawing.picture_files import output_path, save, settings
from topologies.drawing.round_pictures import Layout, caption, draw_round, layout_of
from topologies.matrix_storage import FloatArray
from topologies.schedule import title
from topologies.topology import Topology
from topologies.validation import check_integer

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


#: A product that only comes ever closer to J passes through here; one that becomes exact jumps over it.
_CLOSE = 1e-6

#: Fewest pixels along a side of a heat map: viewers smooth a small image when they enlarge it.
_PIXELS = 400

INK, FAINT = "#1f2933", "#5f6b76"
FONT = 7.5


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


def draw_matrix(axes: Any, matrix: FloatArray, title: str) -> None:
    """Draw a matrix as a heat map, and its colours as a scale beside it.

    An entry that is 0 is white. Where some are negative the colours diverge: blue above and red below 0.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    n = len(matrix)
    shown = np.where(np.abs(matrix) <= ROUNDING, 0.0, matrix)
    diverges = shown.min() < 0
    largest = float(np.abs(shown).max())
    colours = (
        colormaps["RdBu"](np.linspace(0.02, 0.98, 256)) if diverges else colormaps["Blues"](np.linspace(0.18, 1, 256))
    )
    image = axes.imshow(
        np.ma.masked_equal(np.kron(shown, np.ones((-(-_PIXELS // n),) * 2)), 0.0),
        cmap=ListedColormap(colours).with_extremes(bad="white"),
        vmin=-largest if diverges else 0.0,
        vmax=largest,
        interpolation="none",
        extent=(-0.5, n - 0.5, n - 0.5, -0.5),
    )
    ticks = [0] if n == 1 else [0, n - 1] if n < 12 else [0, n // 2, n - 1]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    _frame(axes, title, "rank that is read", "rank that reads")
    marks = [-largest, 0.0, largest] if diverges else [0.0, largest]
    scale = axes.figure.colorbar(image, cax=axes.inset_axes((1.04, 0.0, 0.05, 1.0)))
    scale.set_ticks(marks, labels=[f"{mark:.3g}" for mark in marks])
    scale.solids.set_rasterized(True)  # one small image in place of 256 areas
    _frame(scale.ax)


def draw_curve(
    axes: Any, topology: Topology, *, at_most: int, title: str = "largest share of a disagreement left"
) -> None:
    """Draw ``||W_(k-1) .. W_0 - J||_2`` against k, from the end of the warm-up on: three periods, 16 exchanges or more.

    The curve ends where it is exact, or below 1e-12. The axis is logarithmic where it spans more than two decades.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    last = topology.phases[-1]
    errors = consensus_errors(last.topology, max(1, min(at_most, max(16, 3 * (last.topology.period or 8)))))
    end = next((k for k, error in enumerate(errors) if error <= ROUNDING), None)
    kept = errors[:end]
    style = {"drawstyle": "steps-post"} if last.every > 1 else {}
    marker = "." if len(kept) <= 40 else ""
    rounds = last.every * np.arange(len(kept))
    axes.plot(rounds, kept, color="#2f6db3", linewidth=1.3, marker=marker, markersize=4, **style)
    when = "rounds after the warm-up" if topology.warmup else "rounds"
    _frame(axes, title, when, "‖ W … W \N{MINUS SIGN} J ‖₂")
    axes.spines[["top", "right"]].set_visible(False)
    if len(kept) and kept.min() < 0.01:
        axes.set_yscale("log")
        decade = np.floor(np.log10(kept.min()))
        bottom = 10.0 ** (decade - (end is not None) * max(1.0, -decade / 6))
        axes.set_ylim(bottom, 2.0)
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value > 5e-3 else f"1e{np.log10(value):.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        bottom = 0.0
        axes.set_ylim(0.0, max(1.05, 1.05 * float(errors.max())))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if end is not None:
        _mark_end(axes, last.every * end, bottom, rounds, kept)
    axes.set_xlim(0, last.every * max(len(kept) - 1, end or 0, 1) * 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.6)
    axes.set_axisbelow(True)


def _mark_end(axes: Any, end: int, bottom: float, rounds: Any, kept: FloatArray) -> None:
    """Mark where the curve ends: at exactness, or only within rounding of it."""
    if len(kept):
        axes.plot([rounds[-1], end], [kept[-1], bottom], color="#2f6db3", linewidth=1.0, linestyle=(0, (2, 2)))
    axes.plot([end], [bottom], marker="o", markersize=6, color="#c8641b", clip_on=False, zorder=5, linestyle="")
    what = "exact" if not len(kept) or kept[-1] > _CLOSE else "below 1e-12"
    when = f"after {end} round{'' if end == 1 else 's'}" if end else "from the start"
    axes.annotate(
        f"{what} {when}", (end, bottom), xytext=(-7 if end else 7, 5), textcoords="offset points",
        ha="right" if end else "left", va="bottom", fontsize=FONT, color=INK, zorder=6,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip


def _frame(axes: Any, title: str = "", across: str = "", down: str = "") -> None:
    axes.set_title(title, fontsize=FONT + 1, color=INK, pad=4)
    axes.set_xlabel(across, fontsize=FONT, color=FAINT, labelpad=2)
    axes.set_ylabel(down, fontsize=FONT, color=FAINT, labelpad=2)
    axes.tick_params(labelsize=FONT - 0.5, length=2, pad=2, color=FAINT, labelcolor=FAINT, width=0.6)
    for spine in axes.spines.values():
        spine.set_linewidth(0.6)
        spine.set_color("#9aa5b1")

"""Panels about how a schedule mixes: a matrix as a heat map, and the distance to the mean over the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from topologies.analysis import consensus_errors
from topologies.analysis.disagreement import ROUNDING
from topologies.matrix_storage import FloatArray

if TYPE_CHECKING:
    from topologies.topology import Topology

#: A product that only comes ever closer to J passes through here; one that becomes exact jumps over it.
_CLOSE = 1e-6

#: Fewest pixels along a side of a heat map: viewers smooth a small image when they enlarge it.
_PIXELS = 400

INK, FAINT = "#1f2933", "#5f6b76"
FONT = 7.5


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

"""Panels about how a schedule mixes: a matrix as a heat map, and the distance to the mean over the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from topologies.analysis import consensus_errors
from topologies.matrix_storage import FloatArray

if TYPE_CHECKING:
    from topologies.topology import Topology

#: What is left below this is rounding.
_ROUNDING = 1e-12
#: A product that only comes ever closer to J passes through here; one that becomes exact jumps over it.
_CLOSE = 1e-6

#: Fewest pixels along a side of a heat map.
_PIXELS = 400

_INK = "#1f2933"
_FAINT = "#5f6b76"
_ACCENT = "#2f6db3"
_MARK = "#c8641b"


def draw_matrix(axes: Any, scale_axes: Any, matrix: FloatArray, title: str, *, font_size: float) -> None:
    """Draw a matrix as a heat map and its colours as a scale.

    An entry that is 0 is white. Where some are negative the colours diverge: blue above and red below 0.
    """
    n = len(matrix)
    shown = np.where(np.abs(matrix) <= _ROUNDING, 0.0, matrix)
    low, high = float(shown.min()), float(shown.max())
    largest = max(abs(low), abs(high))
    bottom = -largest if low < 0 else 0.0
    colours = _colour_map(diverging=low < 0)
    # Viewers smooth a small image when they enlarge it.
    enlarged = np.kron(shown, np.ones((-(-_PIXELS // n),) * 2))
    axes.imshow(
        np.ma.masked_equal(enlarged, 0.0),
        cmap=colours,
        vmin=bottom,
        vmax=largest,
        interpolation="none",
        extent=_extent(n),
    )
    _frame(axes, font_size)
    ticks = [0] if n == 1 else [0, n - 1] if n < 12 else [0, n // 2, n - 1]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.set_xlabel("rank that is read", fontsize=font_size, color=_FAINT, labelpad=2)
    axes.set_ylabel("rank that reads", fontsize=font_size, color=_FAINT, labelpad=1)
    axes.set_title(title, fontsize=font_size + 1, color=_INK, pad=4, y=1.0)  # as usual, without a search for the place
    gradient = np.linspace(bottom, largest, 128)[:, None]
    scale_axes.imshow(
        gradient, cmap=colours, vmin=bottom, vmax=largest, aspect="auto", origin="lower", interpolation="none",
        extent=(0, 1, bottom, largest),
    )  # fmt: skip
    _frame(scale_axes, font_size)
    scale_axes.set_xticks([])
    scale_axes.yaxis.tick_right()
    marks = [-largest, 0.0, largest] if low < 0 else [0.0, largest]
    scale_axes.set_yticks(marks, [f"{mark:.3g}" for mark in marks])


def draw_curve(
    axes: Any,
    topology: Topology,
    *,
    num_exchanges: int,
    font_size: float,
    title: str = "largest share of a disagreement left",
) -> None:
    """Draw ``||W_(k-1) .. W_0 - J||_2`` against k, from the end of the warm-up on.

    The curve ends where it is exact, or below 1e-12. The axis is logarithmic where it spans more than two decades.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    last = topology.phases[-1]
    errors = consensus_errors(last.topology, num_exchanges)
    end = next((k for k, error in enumerate(errors) if error <= _ROUNDING), None)
    kept = errors[:end]
    rounds = last.every * np.arange(len(kept))
    is_log = len(kept) > 0 and kept.min() < 0.01
    style = {"drawstyle": "steps-post"} if last.every > 1 else {}
    marker = "." if len(kept) <= 40 else ""
    axes.plot(rounds, kept, color=_ACCENT, linewidth=1.3, marker=marker, markersize=4, **style)
    _frame(axes, font_size)
    axes.spines[["top", "right"]].set_visible(False)
    if is_log:
        axes.set_yscale("log")
        decade = np.floor(np.log10(kept.min()))
        bottom = 10.0 ** (decade - (end is not None) * max(1.0, -decade / 6))
        axes.set_ylim(bottom, 2.0)
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        bottom = 0.0
        axes.set_ylim(0.0, max(1.05, 1.05 * float(errors.max())))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if end is not None:
        _draw_end(axes, last.every * end, bottom, kept, last.every, font_size)
    axes.set_xlim(0, last.every * max(len(kept) - 1, end or 0, 1) * 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(
        f"rounds{' after the warm-up' if topology.warmup else ''}", fontsize=font_size, color=_FAINT, labelpad=2
    )
    axes.set_ylabel("‖ W … W \N{MINUS SIGN} J ‖₂", fontsize=font_size, color=_FAINT, labelpad=2)
    axes.set_title(title, fontsize=font_size + 1, color=_INK, pad=4)


def _draw_end(axes: Any, end: int, bottom: float, kept: FloatArray, every: int, font_size: float) -> None:
    """Mark where the curve ends: at exactness, or only within rounding of it."""
    is_exact = not len(kept) or kept[-1] > _CLOSE
    if len(kept):
        before = every * (len(kept) - 1)
        axes.plot([before, end], [kept[-1], bottom], color=_ACCENT, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.plot([end], [bottom], marker="o", markersize=6, color=_MARK, clip_on=False, zorder=5, linestyle="")
    when = f"after {end} round{'' if end == 1 else 's'}" if end else "from the start"
    axes.annotate(
        f"{'exact' if is_exact else 'below 1e-12'} {when}",
        (end, bottom),
        xytext=(-7 if end else 7, 5),
        textcoords="offset points",
        ha="right" if end else "left",
        va="bottom",
        fontsize=font_size,
        color=_INK,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        zorder=6,
    )


def _power_of_ten(value: float, _: int) -> str:
    return f"{value:g}" if value > 5e-3 else f"1e{np.log10(value):.0f}"


def horizon(topology: Topology, at_most: int) -> int:
    """Return how many exchanges a curve shows: three periods, 16 or more."""
    period = topology.phases[-1].topology.period
    return max(1, min(at_most, max(16, 3 * (period or 8))))


def _frame(axes: Any, font_size: float) -> None:
    axes.tick_params(labelsize=font_size - 0.5, length=2, pad=2, color=_FAINT, labelcolor=_FAINT, width=0.6)
    for spine in axes.spines.values():
        spine.set_linewidth(0.6)
        spine.set_color("#9aa5b1")


def _extent(n: int) -> tuple[float, float, float, float]:
    return -0.5, n - 0.5, n - 0.5, -0.5


def _colour_map(*, diverging: bool) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    if diverging:
        colours = colormaps["RdBu"](np.linspace(0.02, 0.98, 256))
    else:
        colours = colormaps["Blues"](np.linspace(0.18, 1.0, 256))
    return ListedColormap(colours).with_extremes(bad="white")

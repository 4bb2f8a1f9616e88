"""The figure of a comparison: consensus errors against rounds and against bytes."""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topologies import analysis
from topologies.drawing.picture_files import picture_path, save, settings
from topologies.matrix_storage import FloatArray
from topologies.reports.comparing import Comparison
from topologies.reports.units import bytes_text

_COLOURED = 10
_MOST_ROUNDS = 120
_LEAST_ERROR = 1e-6
_GREY = "#c4c9ce"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))  # for further lines
_COLOURS = (
    "#2f6db3", "#c8641b", "#2a9d5c", "#b3283a", "#7d5ba6", "#8c6239", "#d667a5", "#1f9aa8", "#8a8f1f", "#444f5a",
)  # fmt: skip


def draw_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Write a figure: what is left of the worst disagreement against rounds, and against bytes sent per rank.

    Every topology that was asked for has a name in the legend, also where its line lies on another's. Of all
    families the ten that send the fewest bytes have; the others are grey.

    Parameters
    ----------
    comparison
        What :func:`topologies.compare` returned.
    path
        Where to write, .svg or .png.

    Raises
    ------
    ValueError
        If the path ends neither in .svg nor in .png.
    ImportError
        If matplotlib is missing.
    """
    target = picture_path(path)
    with settings("path"):
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        curves = _curves(comparison)
        coloured = curves if comparison.asked else curves[:_COLOURED]
        labels = [
            "\n= ".join(textwrap.shorten(name, 44, placeholder=" ..") for name in curve.names) for curve in coloured
        ]
        num_lines = sum(label.count("\n") + 1 for label in labels)
        styles = [_style(index) for index in range(len(coloured))]
        figure = Figure(figsize=(12.0, max(4.6, 0.18 * num_lines + 0.8)))
        places = {"left": 0.065, "right": 0.72, "bottom": 0.12, "top": 0.9, "wspace": 0.08}
        by_rounds, by_bytes = figure.subplots(1, 2, sharey=True, gridspec_kw=places)
        for index, curve in reversed(list(enumerate(curves))):
            style = styles[index] if index < len(coloured) else {"color": _GREY, "linewidth": 0.8, "zorder": 1}
            _draw_errors(by_rounds, np.arange(len(curve.errors), dtype=np.float64), curve.errors, style)
            _draw_errors(by_bytes, curve.sent, curve.errors, style)
        leading = curves[:_COLOURED]  # they say how far the axes go, or the slowest would press all others together
        shown = [_rounds_shown(curve, comparison.tolerance) for curve in leading]
        by_rounds.set_xlim(0, _most(shown))
        by_bytes.set_xlim(0, _most([curve.sent[rounds] for curve, rounds in zip(leading, shown, strict=True)]))
        by_rounds.set_xlabel("rounds")
        by_bytes.set_xlabel("bytes sent per rank" if comparison.message_bytes != 1.0 else "messages sent per rank")
        by_rounds.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        by_bytes.xaxis.set_major_locator(MaxNLocator(5))
        by_bytes.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
        by_rounds.set_ylabel("largest share of a disagreement left")
        for axes in (by_rounds, by_bytes):
            axes.set_yscale("log")
            axes.set_ylim(_LEAST_ERROR, max(1.6, 1.2 * max(float(curve.errors.max()) for curve in curves)))
            axes.axhline(comparison.tolerance, color="#5f6b76", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.grid(color="#e3e7eb", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"Consensus of {comparison.heading}", fontsize=11)
        others = len(curves) - len(coloured)
        figure.legend(
            [Line2D([], [], **style) for style in styles],
            labels,
            loc="upper left",
            bbox_to_anchor=(0.73, 0.92),
            alignment="left",
            fontsize=8,
            frameon=False,
            title=f"fewest bytes first{f'; {others} more in grey' if others else ''}",
            title_fontsize=8,
        )
        save(figure, target)


def _style(index: int) -> dict[str, Any]:
    """Return what tells the line of this number from the others with a name: its colour, then its dashes."""
    dashes, colour = divmod(index, len(_COLOURS))
    return {
        "color": _COLOURS[colour],
        "linestyle": _DASHES[dashes % len(_DASHES)],
        "linewidth": 1.6,
        "zorder": 3,
    }


@dataclass
class _Curve:
    """Topologies that do the same, their errors, and the bytes that a rank has sent by each round."""

    names: list[str]
    errors: FloatArray
    sent: FloatArray


def _curves(comparison: Comparison) -> list[_Curve]:
    """Return one curve for all topologies with the same errors and bytes, in the comparison's order."""
    needed = [min(row.rounds or _MOST_ROUNDS, _MOST_ROUNDS) for row in comparison.rows]
    num_rounds = max(8, *(math.ceil(1.3 * rounds) for rounds in needed))
    curves: list[_Curve] = []
    for row, topology in zip(comparison.rows, comparison.topologies, strict=True):
        errors = analysis.consensus_errors(topology, num_rounds, start=topology.warmup)
        traffic = analysis.traffic(topology, message_bytes=comparison.message_bytes)
        sent = np.array([traffic.bytes_in(k) for k in range(num_rounds + 1)])
        for curve in curves:
            if np.allclose(curve.errors, errors, rtol=0, atol=1e-12) and np.allclose(curve.sent, sent):
                curve.names.append(row.topology)
                break
        else:
            curves.append(_Curve([row.topology], errors, sent))
    return curves


def _rounds_shown(curve: _Curve, tolerance: float) -> int:
    """Return until when a curve is worth seeing: a bit beyond the tolerance."""
    below = np.flatnonzero(curve.errors <= tolerance)
    reached = int(below[0]) if len(below) else len(curve.errors) - 1
    return min(math.ceil(1.2 * reached), len(curve.errors) - 1)


def _most(shown: Sequence[float]) -> float:
    """Return where an axis ends: a slow curve may leave it, so that the others are seen."""
    return 1.05 * min(max(shown), 5.0 * statistics.median(shown)) or 1.0


def _draw_errors(axes: Any, across: FloatArray, errors: FloatArray, style: dict[str, Any]) -> None:
    """Draw a curve; where it becomes exact it falls, dotted, to a point on the axis."""
    exact = np.flatnonzero(errors == 0.0)
    end = int(exact[0]) if len(exact) else len(errors)
    axes.plot(across[:end], errors[:end], **style)
    if 0 < end < len(errors) and errors[end - 1] > _LEAST_ERROR:
        falls = {**style, "linestyle": ":"}
        axes.plot(across[end - 1 : end + 1], [errors[end - 1], _LEAST_ERROR], **falls)
        axes.plot(across[end], _LEAST_ERROR, **falls, marker="o", markersize=6, clip_on=False)

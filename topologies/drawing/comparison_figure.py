"""The figure of a comparison: consensus errors against rounds and against bytes."""

import math
import os
import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from topologies import analysis
from topologies.drawing.picture_files import output_path, save, settings
from topologies.matrix_storage import FloatArray
from topologies.reports.comparing import Comparison
from topologies.reports.units import bytes_text

_COLOURED = 10
_MOST_ROUNDS = 120
_LEAST_ERROR = 1e-6
_GREY: dict[str, Any] = {"color": "#c4c9ce", "linewidth": 0.8, "zorder": 1}
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))  # for further lines
_COLOURS = (
    "#2f6db3", "#c8641b", "#2a9d5c", "#b3283a", "#7d5ba6", "#8c6239", "#d667a5", "#1f9aa8", "#8a8f1f", "#444f5a",
)  # fmt: skip


def draw_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Write a figure: what is left of the worst disagreement against rounds, and against bytes sent per rank.

    Every topology that was asked for has a name in the legend, also where its line lies on another's. Of all
    families the ten that send the fewest bytes have; the others are grey.

    The path ends in .svg or .png.
    """
    target = output_path(path)
    with settings("path"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        curves = _curves(comparison)
        num_named = len(curves) if comparison.asked else min(_COLOURED, len(curves))
        num_lines = sum(len(curve.names) for curve in curves[:num_named])
        figure = Figure(figsize=(12.0, max(4.6, 0.18 * num_lines + 0.8)))
        places = {"left": 0.065, "right": 0.72, "bottom": 0.12, "top": 0.9, "wspace": 0.08}
        panels = figure.subplots(1, 2, sharey=True, gridspec_kw=places)
        for index, curve in reversed(list(enumerate(curves))):
            for axes, across in zip(panels, (curve.rounds, curve.sent), strict=True):
                _draw_errors(axes, across, curve, _style(index) if index < num_named else _GREY)
        panels[0].set_xlabel("rounds")
        panels[0].set_ylabel("largest share of a disagreement left")
        panels[1].set_xlabel("bytes sent per rank" if comparison.message_bytes != 1.0 else "messages sent per rank")
        panels[1].xaxis.set_major_formatter(lambda value, _: bytes_text(value))
        leading = curves[:_COLOURED]  # they say how far the axes go, or the slowest would press all others together
        for axes, name in zip(panels, ("rounds", "sent"), strict=True):
            ends = [getattr(curve, name)[curve.rounds_shown(comparison.tolerance)] for curve in leading]
            axes.set_xlim(0, 1.05 * min(max(ends), 5.0 * statistics.median(ends)) or 1.0)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=name == "rounds"))
            axes.set_yscale("log")
            axes.set_ylim(_LEAST_ERROR, max(1.6, 1.2 * max(float(curve.errors.max()) for curve in curves)))
            axes.axhline(comparison.tolerance, color="#5f6b76", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.grid(color="#e3e7eb", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"Consensus of {comparison.heading}", fontsize=11)
        others = f"; {len(curves) - num_named} more in grey" if len(curves) > num_named else ""
        _add_legend(figure, curves[:num_named], f"fewest bytes first{others}")
        save(figure, target)


@dataclass
class _Curve:
    """Topologies that do the same, their errors, and the bytes that a rank has sent by each round."""

    names: list[str]
    errors: FloatArray
    sent: FloatArray

    @property
    def rounds(self) -> FloatArray:
        return np.arange(len(self.errors), dtype=np.float64)

    def rounds_shown(self, tolerance: float) -> int:
        """Return until when the curve is worth seeing: a bit beyond the tolerance."""
        last = len(self.errors) - 1
        below = np.flatnonzero(self.errors <= tolerance)
        return min(math.ceil(1.2 * below[0]), last) if len(below) else last


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


def _style(index: int) -> dict[str, Any]:
    """Return what tells the line of this number from the others with a name: its colour, then its dashes."""
    dashes, colour = divmod(index, len(_COLOURS))
    return {"color": _COLOURS[colour], "linestyle": _DASHES[dashes % len(_DASHES)], "linewidth": 1.6, "zorder": 3}


def _draw_errors(axes: Any, across: FloatArray, curve: _Curve, style: dict[str, Any]) -> None:
    """Draw a curve; where it becomes exact it falls, dotted, to a point on the axis."""
    errors, exact = curve.errors, np.flatnonzero(curve.errors == 0.0)
    end = int(exact[0]) if len(exact) else len(errors)
    axes.plot(across[:end], errors[:end], **style)
    if 0 < end < len(errors) and errors[end - 1] > _LEAST_ERROR:
        falls = {**style, "linestyle": ":"}
        axes.plot(across[end - 1 : end + 1], [errors[end - 1], _LEAST_ERROR], **falls)
        axes.plot(across[end], _LEAST_ERROR, **falls, marker="o", markersize=6, clip_on=False)


def _add_legend(figure: Any, curves: list[_Curve], title: str) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_style(index)) for index in range(len(curves))]
    labels = ["\n= ".join(textwrap.shorten(name, 44, placeholder=" ..") for name in curve.names) for curve in curves]
    figure.legend(
        lines, labels, loc="upper left", bbox_to_anchor=(0.73, 0.92), alignment="left", fontsize=8, frameon=False,
        title=title, title_fontsize=8,
    )  # fmt: skip

"""Figure of the loss against seconds, and against bytes per rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossip.lab.benchmarks.bench_figures import COLOURS, LINES, STYLE, import_matplotlib, save
from gossip.lab.time_to_loss.loss_curves import target_of
from gossip.lab.time_to_loss.loss_table import LossResult


def loss_figure(results: Sequence[LossResult], path: str | Path) -> Path:
    """Draw a row of two panels per result: every seed's curve, and the target of the first seed.

    The axis of bytes begins at the bytes per step of the method that sends least, because next to nothing is sent
    before the first exchange.

    Parameters
    ----------
    results : sequence of LossResult
    path : str or Path
        The path of the file to write; its suffix determines the format.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        figure = Figure(figsize=(9.2, 2.9 * len(results) + 0.6), layout="constrained", facecolor="white")
        panels = figure.subplots(len(results), 2, sharey="row", squeeze=False)
        for (seconds, sent), result in zip(panels, results, strict=True):
            labels = [row.label for row in result.rows]
            for curve in result.curves:
                number = labels.index(curve.method)
                look = {
                    "color": COLOURS[number % len(COLOURS)],
                    "linestyle": LINES[number // len(COLOURS) % len(LINES)],
                    "linewidth": 1.2,
                    "label": curve.method if curve.seed == result.curves[0].seed else None,
                }
                losses = [point.loss for point in curve.points]
                seconds.plot([point.seconds for point in curve.points], losses, **look)
                sent.plot([point.sent_bytes / 1e6 for point in curve.points], losses, **look)
            step_bytes = [curve.points[-1].sent_bytes / curve.points[-1].step for curve in result.curves]
            if smallest := min(filter(None, step_bytes), default=None):
                sent.set_xlim(left=smallest / 1e6)
            for axes, quantity in ((seconds, "seconds of training"), (sent, "MB sent per rank")):
                axes.axhline(target_of(result.curves[0].points), color="black", linewidth=0.8, linestyle=":")
                axes.set_xscale("log")
                axes.set_yscale("log")
                for axis in (axes.xaxis, axes.yaxis):
                    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
                    axis.set_minor_formatter(NullFormatter())
                axes.set_xlabel(quantity)
                axes.grid()
            seconds.set_ylabel("loss of the averaged model")
            seconds.set_title(f"{result.task}, {result.link}")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return save(figure, path)

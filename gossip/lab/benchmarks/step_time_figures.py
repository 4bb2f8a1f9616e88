"""Figures of a benchmark of steps: the parts of a step, and step time against link rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.lab.benchmarks.network.networks import Link
from gossip.lab.benchmarks.step_time_report import StepTimeResult
from gossip.lab.experiments.run_figures import BLUE, GREY, ORANGE, STYLE, import_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, whose colours colour-blind readers can distinguish.
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":")
_MARKERS = "osD^vPX"
_MAX_BANDS = 6  # more bands would hide each other


def look(number: int) -> dict[str, Any]:
    """Return colour and line style of the method with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number // len(COLOURS) % len(LINES)]}


def parts_figure(results: Sequence[StepTimeResult], path: Path) -> None:
    """Draw bars of compute and exposed communication, one panel per rate; whiskers are the quartiles of the step time.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure

        num_rows = max(len(result.rows) for result in results)
        height = len(results) * (0.28 * num_rows + 0.8) + 0.35
        figure = Figure(figsize=(7.2, height), layout="constrained", facecolor="white")
        for number, result in enumerate(results):
            axes = figure.add_subplot(len(results), 1, number + 1)
            _draw_parts(axes, result)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        save(figure, path)


def _draw_parts(axes: Axes, result: StepTimeResult) -> None:
    rows = result.rows[::-1]
    places = range(len(rows))
    compute = [1e3 * min(row.compute_s or 0.0, row.step_s.median) for row in rows]
    totals = [1e3 * row.step_s.median for row in rows]
    exposed = [total - part for total, part in zip(totals, compute, strict=True)]
    axes.barh(places, compute, height=0.62, color=BLUE, label="compute (the step of local)")
    axes.barh(places, exposed, height=0.62, left=compute, color=ORANGE, label="exposed communication")
    below = [1e3 * (row.step_s.median - row.step_s.low) for row in rows]
    above = [1e3 * (row.step_s.high - row.step_s.median) for row in rows]
    axes.errorbar(totals, places, xerr=[below, above], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    furthest = max(total + whisker for total, whisker in zip(totals, above, strict=True))
    for place, total, whisker in zip(places, totals, above, strict=True):
        text = f"{total:.1f}" if total < 100 else f"{total:.0f}"
        axes.text(total + whisker + 0.012 * furthest, place, text, va="center", color=GREY, fontsize=8)
    axes.set_yticks(places, [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.08 * furthest)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("step time, ms")
    axes.set_title(result.title)


def rates_figure(results: Sequence[StepTimeResult], path: Path) -> None:
    """Draw step time against link rate on logarithmic axes; bands show the quartiles if there are few methods.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator

        figure = Figure(figsize=(7.2, 3.8), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        by_rate = sorted(
            ((Link.parse(str(result.rate)).bits_per_second / 1e6, result) for result in results),
            key=lambda pair: pair[0],
        )
        rates = [rate for rate, _ in by_rate]
        for number, rows in enumerate(zip(*(result.rows for _, result in by_rate), strict=True)):
            style, marker = look(number), _MARKERS[number % len(_MARKERS)]
            low, median, high = (
                [1e3 * getattr(row.step_s, what) for row in rows] for what in ("low", "median", "high")
            )
            axes.plot(rates, median, label=rows[0].label, marker=marker, markersize=4.5, **style)
            if len(results[0].rows) <= _MAX_BANDS:
                axes.fill_between(rates, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("rate of every link, Mbit/s each way")
        axes.set_ylabel("step time, ms")
        axes.set_title("Step time against rate")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        save(figure, path)

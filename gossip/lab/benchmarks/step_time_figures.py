"""Figures of a benchmark of steps: the parts of a step, and step time against link rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.lab.benchmarks.network.networks import Link
from gossip.lab.benchmarks.step_time_report import StepTimeResult
from gossip.lab.benchmarks.summaries import look, set_logarithmic
from gossip.lab.experiments.run_figures import BLUE, GREY, ORANGE, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX"
_MAX_BANDS = 6  # more bands would hide each other


def parts_figure(results: Sequence[StepTimeResult], path: Path) -> None:
    """Draw bars of compute and exposed communication, one panel per rate; whiskers are quartiles of the step time."""
    num_rows = max(len(result.rows) for result in results)
    with drawn(path, 7.2, len(results) * (0.28 * num_rows + 0.8) + 0.35) as figure:
        for number, result in enumerate(results):
            axes = figure.add_subplot(len(results), 1, number + 1)
            _draw_parts(axes, result)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _draw_parts(axes: Axes, result: StepTimeResult) -> None:
    rows = result.rows[::-1]
    places = range(len(rows))
    compute = [1e3 * min(row.compute_s or 0.0, row.step_s.median) for row in rows]
    totals = [1e3 * row.step_s.median for row in rows]
    exposed = [total - part for total, part in zip(totals, compute, strict=True)]
    axes.barh(places, compute, height=0.62, color=BLUE, label="compute (the step of local)")
    whiskers = [
        [1e3 * (row.step_s.median - row.step_s.low) for row in rows],
        [1e3 * (row.step_s.high - row.step_s.median) for row in rows],
    ]
    style: dict[str, Any] = {"height": 0.62, "color": ORANGE, "label": "exposed communication", "capsize": 2}
    bars = axes.barh(places, exposed, left=compute, xerr=whiskers, **style)
    axes.bar_label(bars, [f"{total:.4g}" for total in totals], padding=4, color=GREY, fontsize=8)
    axes.set_yticks(places, [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("step time, ms")
    axes.set_title(result.title)


def rates_figure(results: Sequence[StepTimeResult], path: Path) -> None:
    """Draw step time against link rate on logarithmic axes; bands show the quartiles if there are few methods."""
    with_rate = [(Link.parse(str(result.rate)).bits_per_second / 1e6, result.rows) for result in results]
    by_rate = sorted(with_rate, key=lambda pair: pair[0])
    rates = [rate for rate, _ in by_rate]
    with drawn(path, 7.2, 3.8) as figure:
        axes = figure.add_subplot()
        for number, rows in enumerate(zip(*(rows for _, rows in by_rate), strict=True)):
            low, median, high = (
                [1e3 * getattr(row.step_s, what) for row in rows] for what in ("low", "median", "high")
            )
            marker = _MARKERS[number % len(_MARKERS)]
            (line,) = axes.plot(rates, median, label=rows[0].label, marker=marker, markersize=4.5, **look(number))
            if len(results[0].rows) <= _MAX_BANDS:
                axes.fill_between(rates, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        set_logarithmic(axes.yaxis)
        axes.set_xlabel("rate of every link, Mbit/s each way")
        axes.set_ylabel("step time, ms")
        axes.set_title("Step time against rate")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

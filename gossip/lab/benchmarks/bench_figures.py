"""Figures of a benchmark: the parts of a step, and step time against link rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.lab.benchmarks.bench_report import Row
from gossip.lab.benchmarks.bench_tables import Result
from gossip.lab.benchmarks.networks import bits_per_second

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, whose colours colour-blind readers can distinguish.
_COMPUTE, _EXPOSED = "#0072B2", "#D55E00"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":")
_MARKERS = "osD^vPX"
_GREY = "#555555"
_MAX_BANDS = 6  # more bands would hide each other
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "xtick.color": _GREY,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 200,
    "svg.hashsalt": "gossip",
}


def parts_figure(results: Sequence[Result], path: str | Path) -> Path:
    """Draw bars of compute and exposed communication, one panel per rate; whiskers are the quartiles of the step time.

    Parameters
    ----------
    results : sequence of Result
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

        num_rows = max(len(result.rows) for result in results)
        height = len(results) * (0.28 * num_rows + 0.8) + 0.35
        figure = Figure(figsize=(7.2, height), layout="constrained", facecolor="white")
        for number, result in enumerate(results):
            axes = figure.add_subplot(len(results), 1, number + 1)
            _draw_parts(axes, result)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return save(figure, path)


def _draw_parts(axes: Axes, result: Result) -> None:
    rows = list(result.rows)[::-1]
    places = range(len(rows))
    compute = [1e3 * min(row.compute_s or 0.0, row.step_s.median) for row in rows]
    totals = [1e3 * row.step_s.median for row in rows]
    exposed = [total - part for total, part in zip(totals, compute, strict=True)]
    axes.barh(places, compute, height=0.62, color=_COMPUTE, label="compute (the step of local)")
    axes.barh(places, exposed, height=0.62, left=compute, color=_EXPOSED, label="exposed communication")
    below = [1e3 * (row.step_s.median - row.step_s.low) for row in rows]
    above = [1e3 * (row.step_s.high - row.step_s.median) for row in rows]
    axes.errorbar(totals, places, xerr=[below, above], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    furthest = max(total + whisker for total, whisker in zip(totals, above, strict=True))
    for place, total, whisker in zip(places, totals, above, strict=True):
        axes.text(
            total + whisker + 0.012 * furthest,
            place,
            f"{total:.1f}" if total < 100 else f"{total:.0f}",
            va="center",
            color=_GREY,
            fontsize=8,
        )
    axes.set_yticks(places, [row.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.08 * furthest)
    axes.grid(axis="x")
    axes.set_xlabel("step time, ms")
    axes.set_title(result.title[0].upper() + result.title[1:])


def rates_figure(results: Sequence[Result], path: str | Path) -> Path:
    """Draw step time against link rate on logarithmic axes; bands show the quartiles if there are few methods.

    Parameters
    ----------
    results : sequence of Result
        Results with a rate each.
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

        figure = Figure(figsize=(7.2, 3.8), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        ordered = sorted(results, key=lambda result: bits_per_second(str(result.rate)))
        rates = [bits_per_second(str(result.rate)) / 1e6 for result in ordered]
        for number, label in enumerate(row.label for row in ordered[0].rows):
            rows = [_labelled(result, label) for result in ordered]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(
                rates,
                [1e3 * row.step_s.median for row in rows],
                label=label,
                color=colour,
                marker=_MARKERS[number % len(_MARKERS)],
                linestyle=LINES[number // len(COLOURS) % len(LINES)],
                markersize=4.5,
            )
            if len(ordered[0].rows) > _MAX_BANDS:
                continue
            axes.fill_between(
                rates,
                [1e3 * row.step_s.low for row in rows],
                [1e3 * row.step_s.high for row in rows],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid()
        axes.set_xlabel("rate of every link, Mbit/s each way")
        axes.set_ylabel("step time, ms")
        axes.set_title("Step time against rate")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return save(figure, path)


def _labelled(result: Result, label: str) -> Row:
    return next(row for row in result.rows if row.label == label)


def save(figure: Any, path: str | Path) -> Path:
    """Save a figure without its date, so that equal figures give identical files."""
    path = Path(path)
    figure.savefig(path, metadata={".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix))
    return path


def import_matplotlib() -> Any:
    """Import matplotlib; if it is not installed, raise an error that says how to install it."""
    try:
        import matplotlib
        import matplotlib.ticker
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"figures need matplotlib ({error}); install it in a clone of the repository: pip install '.[plot]'",
            name=error.name,
        ) from error
    return matplotlib

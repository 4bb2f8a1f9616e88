"""Figures of one run from its records: loss and accuracy, and the consensus distance of the replicas.

The figures are drawn without pyplot (no global state, no window), and the same records give the same bytes.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from loguru import logger

import topologies
from gossip.lab.experiments.records import read_jsonl, record_files
from topologies import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Sequence[Mapping[str, Any]]]
"""The records of each rank, as :func:`gossip.lab.experiments.records.read_jsonl` returns them."""

# The palette of Okabe and Ito, distinguishable for colour-blind readers.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":")
GREY = "#555555"
_MAX_POINTS = 120
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "legend.frameon": False, "legend.fontsize": 8.5,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.edgecolor": GREY,
    "axes.labelcolor": GREY, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#E6E6E6", "grid.linewidth": 0.8, "xtick.color": GREY, "ytick.color": GREY,
    "lines.linewidth": 1.6, "lines.solid_capstyle": "round", "savefig.dpi": 200, "svg.hashsalt": "gossip",
}  # fmt: skip


class _Panel(NamedTuple):
    """A part of a figure: label, colour and marker of the values that it shows, by their keys in the records."""

    title: str
    curves: Mapping[str, tuple[str, str, str]]
    unit: str = ""
    scale: Literal["linear", "percent", "log"] = "linear"


_ABSOLUTE = r"$\sqrt{\mathrm{mean}_i\,\Vert x_i - \overline{x}\,\Vert^2}$"
_RELATIVE = r"divided by $\Vert \overline{x}\,\Vert$"
_DISTANCE = ("between replicas", BLUE, "")
FIGURES = {
    "training": (
        _Panel("Training loss", {"loss": ("training batch", BLUE, "")}),
        _Panel(
            "Accuracy",
            {
                "accuracy": ("training batch", BLUE, ""),
                "test_accuracy": ("test, each replica", ORANGE, "o"),
                "averaged_test_accuracy": ("test, averaged model", GREEN, "s"),
            },
            scale="percent",
        ),
    ),
    "consensus": (
        _Panel("Consensus distance", {"consensus_distance": _DISTANCE}, _ABSOLUTE, "log"),
        _Panel("Relative consensus distance", {"consensus_distance_relative": _DISTANCE}, _RELATIVE, "log"),
    ),
}
"""The panels of each figure, by its name."""


def draw_figures(folder: Path, summary: Mapping[str, Any], topology: Topology | None, *, form: str) -> tuple[Path, ...]:
    """Draw loss and accuracy, the consensus distance, and the rounds of the topology, as "svg" or "png".

    Returns the files drawn: of a run that diverged, those for which there are finite numbers.
    """
    changes = summary["changes_of_ranks"]
    by_rank = [read_jsonl(path) for path in record_files(folder)]
    made = []
    for name in FIGURES:
        if draw(name, by_rank, path := folder / f"{name}.{form}", changes):
            made.append(path)
        else:
            logger.warning("{} is left out: no record has a finite number of what it shows", path.name)
    if topology is not None:
        made.append(folder / f"topology.{form}")
        topologies.draw(topology, made[-1])
    return tuple(made)


def draw(name: str, records: Records, path: Path, changes: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Draw one of :data:`FIGURES`; lines are means over the ranks, bands span the lowest to the highest rank.

    A value that is null (not finite) on all ranks is a gap. With more than 120 recorded steps, each rank's curve is
    averaged over windows of records, as the legend notes. Each of the ``changes`` of membership is marked at the "step"
    from which it applies, with the difference of the "members" from then on to those "before".

    Returns whether the records hold anything that the figure shows; else nothing is written.
    """
    everything = [record for of_rank in records for record in of_rank]
    found = [
        (panel, [key for key in panel.curves if any(record.get(key) is not None for record in everything)])
        for panel in FIGURES[name]
    ]
    found = [(panel, keys) for panel, keys in found if keys]
    if not found:
        return False
    ranks = "1 rank" if len(records) == 1 else f"{len(records)} ranks"
    with drawn(path, 7.2, 2.9) as figure:
        for number, (panel, keys) in enumerate(found, start=1):
            axes = figure.add_subplot(1, len(found), number)
            axes.set_title(panel.title)
            axes.set_title(ranks, loc="right", fontsize=8.5, fontweight="normal", color=GREY)
            axes.set(xlabel="Step", ylabel=panel.unit)
            means = [_draw(axes, records, key, *panel.curves[key]) for key in keys]
            axes.locator_params(axis="x", integer=True)
            axes.margins(x=0.02)
            axes.legend()
            if panel.scale == "percent":
                axes.yaxis.set_major_formatter("{x:.0%}")
            if panel.scale == "log" and any((mean > 0).any() for mean in means):
                axes.set_yscale("log", nonpositive="mask")
            _mark(axes, changes)
    return True


def _draw(axes: Axes, records: Records, key: str, label: str, colour: str, marker: str) -> npt.NDArray[np.float64]:
    """Draw the values of ``key`` over the steps, of which a null is NaN; return the means over the ranks, [points]."""
    by_rank = [
        {record["step"]: math.nan if record[key] is None else record[key] for record in rank_records if key in record}
        for rank_records in records
    ]
    steps = sorted(set().union(*by_rank))
    window = max(1, -(-len(steps) // _MAX_POINTS))  # a point is the mean over so many records of a rank
    padding = [math.nan] * (-len(steps) % window)
    values = np.array([[of_rank.get(step, math.nan) for step in steps] + padding for of_rank in by_rank], dtype=float)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mean of empty slice")
        rank_curves = np.nanmean(values.reshape(len(by_rank), -1, window), axis=2)
        places = np.nanmean(np.array(steps + padding, dtype=float).reshape(-1, window), axis=1)
        means: npt.NDArray[np.float64] = np.nanmean(rank_curves, axis=0)
    marker = marker or ("o" if len(places) == 1 else "")  # a line through one point is invisible
    label += f" (means over {window} records)" if window > 1 else ""
    axes.plot(places, means, color=colour, label=label, marker=marker, markersize=4, markeredgecolor="white")
    low, high = (extreme.reduce(rank_curves, axis=0) for extreme in (np.fmin, np.fmax))
    axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    return means


def _mark(axes: Axes, changes: Sequence[Mapping[str, Any]]) -> None:
    """Mark the steps at which ranks were lost, left or joined."""
    for change in changes:
        before, members = set(change["before"]), set(change["members"])
        words = {"without": before - members, "with": members - before}
        text = "; ".join(f"{word} {', '.join(map(str, sorted(ranks)))}" for word, ranks in words.items() if ranks)
        axes.axvline(change["step"], color=GREY, linewidth=0.8, linestyle="--", zorder=1)
        place = change["step"], axes.get_ylim()[1]
        axes.annotate(text, place, (2, -2), textcoords="offset points", rotation=90, va="top", fontsize=7, color=GREY)


def look(number: int) -> dict[str, Any]:
    """Return colour and line style of the curve with this number."""
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)]}


@contextlib.contextmanager
def drawn(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Give a figure of this size in inches, and write it, in the format of the file's ending, when the block ends."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

"""Figures of one run from its records: loss and accuracy, and the consensus distance of the replicas.

The figures are drawn without pyplot (no global state, no window), and the same records give the same bytes: no date,
fixed ids in SVG. The file extension (.svg, .png, .pdf) selects the format.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from loguru import logger

import topologies
from gossip.lab.experiments.records import read_jsonl, record_files
from topologies import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Changes = Sequence[Mapping[str, Any]]
"""Changes of membership: the "step" from which each applies, the "members" from then on and the members "before"."""
Records = Sequence[Sequence[Mapping[str, Any]]]
"""The records of each rank, as :func:`gossip.lab.experiments.records.read_jsonl` returns them."""

# The palette of Okabe and Ito, distinguishable for colour-blind readers.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY = "#555555"
_MAX_POINTS = 120
_BEFORE_AND_AFTER = (("before", "members"), ("members", "before"))
_WIDTH_INCHES = 7.2
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "savefig.dpi": 200,
    "svg.hashsalt": "gossip",
}


@dataclass(frozen=True, eq=False)
class _Curve:
    """One quantity over steps: mean, minimum and maximum over the ranks, float64 [P] each."""

    steps: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    window: int  # number of records of a rank averaged into one point


def draw_figures(folder: Path, summary: Mapping[str, Any], topology: Topology | None, *, form: str) -> tuple[Path, ...]:
    """Draw loss and accuracy, the consensus distance, and the rounds of the topology, as "svg" or "png".

    Returns the files drawn: of a run that diverged, those for which there are finite numbers.
    """
    changes = summary["changes_of_ranks"]
    newest = max((max(change["members"]) for change in changes), default=0)
    files = record_files(folder, max(summary["world_size"], newest + 1))
    by_rank = [read_jsonl(path) for path in files if path.exists()]  # a rank that ended at once has no file
    drawn: list[Path] = []
    for draw, name in ((training_figure, "training"), (consensus_figure, "consensus")):
        try:
            drawn.append(draw(by_rank, folder / f"{name}.{form}", changes))
        except ValueError as error:
            logger.warning("{}.{} is left out: {}", name, form, error)
    if topology is not None:
        drawn.append(folder / f"topology.{form}")
        topologies.draw(topology, drawn[-1])
    return tuple(drawn)


def training_figure(records: Records, path: str | Path, changes: Changes = ()) -> Path:
    """Draw loss and accuracy over steps: lines are means over the ranks, bands span the lowest to the highest rank.

    With more than 120 recorded steps, each rank's curve is first averaged over windows of records, as the figure notes.

    Parameters
    ----------
    records : sequence over ranks of sequences of mappings
        The records of each rank. The figure shows ``loss`` and, where present, ``accuracy``, ``test_accuracy`` and
        ``averaged_test_accuracy``; a value that is null (not finite) on all ranks is a gap.
    path : str or Path
        The file to write; missing folders are created.
    changes : sequence of mapping
        The changes of membership, ``changes_of_ranks`` of the summary; each is marked at its step.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    ValueError
        No record holds a loss.
    """
    loss = _curve(records, "loss")
    if loss is None:
        raise ValueError(f"records hold no number under 'loss', so {path} would be empty; pass each rank's records")
    candidates = (
        ("accuracy", BLUE, "training batch", ""),
        ("test_accuracy", ORANGE, "test, each replica", "o"),
        ("averaged_test_accuracy", GREEN, "test, averaged model", "s"),
    )
    shown = [
        (curve, color, label, marker)
        for key, color, label, marker in candidates
        if (curve := _curve(records, key)) is not None
    ]
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(2 if shown else 1)
        _draw(axes[0], loss, BLUE, "training batch")
        _label(axes[0], "Training loss", _spread(records), loss.window)
        for curve, color, label, marker in shown:
            averaged = f" (windows of {curve.window})" if curve.window > 1 else ""
            _draw(axes[1], curve, color, label + averaged, marker)
        if shown:
            _label(axes[1], "Accuracy", _spread(records))
            axes[1].yaxis.set_major_formatter("{x:.0%}")
            axes[1].legend(loc="lower right")
        for panel in axes:
            _mark(panel, changes)
        return save(figure, path)


def consensus_figure(records: Records, path: str | Path, changes: Changes = ()) -> Path:
    """Draw the consensus distance over steps, also relative to the mean, on a logarithmic scale.

    It shows ``consensus_distance`` and ``consensus_distance_relative`` of the records that hold them, which are the
    same on all ranks; a distance of 0 (equal replicas) is a gap. All else is as for :func:`training_figure`.
    """
    curve = _curve(records, "consensus_distance")
    if curve is None:
        raise ValueError(
            f"records hold no number under 'consensus_distance', so {path} would be empty; measure it at some steps of "
            "the run, or leave this figure out"
        )
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(STYLE):
        panels = [(curve, "Consensus distance", r"$\sqrt{\mathrm{mean}_i\,\Vert x_i - \overline{x}\,\Vert^2}$")]
        if (relative := _curve(records, "consensus_distance_relative")) is not None:
            panels.append((relative, "Relative consensus distance", r"divided by $\Vert \overline{x}\,\Vert$"))
        figure, drawn = _panels(len(panels))
        for axes, (shown, title, unit) in zip(drawn, panels, strict=True):
            if (shown.mean > 0).any():
                axes.set_yscale("log", nonpositive="mask")
                axes.grid(which="minor", axis="y", linewidth=0.5)
            _draw(axes, shown, BLUE, "consensus distance", "o" if len(shown.steps) <= 40 else "")
            _label(axes, title, _count(records), shown.window)
            axes.set_ylabel(unit)
            _mark(axes, changes)
        return save(figure, path)


def _curve(records: Records, key: str) -> _Curve | None:
    """Collect the values of ``key`` from all ranks; None if no record holds a number for it. A null becomes NaN."""
    by_rank = [
        {record["step"]: math.nan if record[key] is None else record[key] for record in rank_records if key in record}
        for rank_records in records
    ]
    steps = sorted(set().union(*by_rank))
    window = max(1, -(-len(steps) // _MAX_POINTS))
    padding = [math.nan] * (-len(steps) % window)
    values = np.array([[of_rank.get(step, math.nan) for step in steps] + padding for of_rank in by_rank], dtype=float)
    if np.isnan(values).all():
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mean of empty slice")
        rank_curves = np.nanmean(values.reshape(len(by_rank), -1, window), axis=2)
        return _Curve(
            steps=np.nanmean(np.array(steps + padding, dtype=float).reshape(-1, window), axis=1),
            mean=np.nanmean(rank_curves, axis=0),
            low=np.fmin.reduce(rank_curves, axis=0),
            high=np.fmax.reduce(rank_curves, axis=0),
            window=window,
        )


def _panels(num_panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, 2.9), layout="constrained", facecolor="white")
    return figure, [figure.add_subplot(1, num_panels, i + 1) for i in range(num_panels)]


def _draw(axes: Axes, curve: _Curve, color: str, label: str, marker: str = "") -> None:
    marker = marker or ("o" if len(curve.steps) == 1 else "")  # a line through one point is invisible
    axes.plot(curve.steps, curve.mean, color=color, label=label, marker=marker, markersize=4, markeredgecolor="white")
    axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)


def _mark(axes: Axes, changes: Changes) -> None:
    """Mark the steps at which ranks were lost, left or joined."""
    for change in changes:
        gone, joined = (sorted(set(change[one]) - set(change[other])) for one, other in _BEFORE_AND_AFTER)
        axes.axvline(change["step"], color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        words = {"without": gone, "with": joined}
        axes.annotate(
            "; ".join(f"{word} {', '.join(map(str, members))}" for word, members in words.items() if members),
            (change["step"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -2),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=7,
            color=GREY,
        )


def _label(axes: Axes, title: str, note: str, window: int = 1) -> None:
    axes.set_title(title)
    axes.set_title(note, loc="right", fontsize=8.5, fontweight="normal", color=GREY)
    axes.set_xlabel("Step" if window == 1 else f"Step (means over windows of {window} records)")
    axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.02)


def _count(records: Records) -> str:
    return "1 rank" if len(records) == 1 else f"{len(records)} ranks"


def _spread(records: Records) -> str:
    return _count(records) if len(records) == 1 else f"mean and range of {_count(records)}"


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure without a date in its metadata; missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    figure.savefig(path, metadata=metadata)
    return path


def import_matplotlib() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"figures need matplotlib ({error}); install it in a clone of the repository: pip install '.[plot]'",
            name=error.name,
        ) from error
    return matplotlib

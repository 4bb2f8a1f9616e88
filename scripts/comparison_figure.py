"""Draw what a sweep found for one number of ranks: accuracy against bytes and predicted time, consensus.

    python scripts/comparison_figure.py outputs/sweeps/topology_comparison docs/topology_comparison.svg [ranks]

The folder is a sweep's, with its results.json; without a number of ranks, the largest is drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter

UNITS = {"bytes": 2**20, "time_s": 1e-3}
LABELS = {"bytes": "MiB sent per rank", "time_s": "predicted time in ms"}
BASELINES = {"all-reduce": "-", "no communication": "--"}


def draw(document: dict[str, Any], world_size: int, path: Path) -> None:
    """Draw the rows with so many ranks."""
    metric = document["metric"]["name"]
    rows = [row for row in document["rows"] if row["world_size"] == world_size and row["curves"] is not None]
    has_absolute = any(any(row["curves"].get("consensus_absolute") or ()) for row in rows)
    curves = {"consensus": "relative consensus distance"}
    curves |= {"consensus_absolute": "consensus distance"} if has_absolute else {}
    figure = Figure(figsize=(12 + 3 * has_absolute, 4.2), layout="constrained")
    by_bytes, by_time, *right = figure.subplots(1, 2 + len(curves))
    colours = iter([f"C{number}" for number in range(10)] * len(rows))
    for row in rows:
        style: dict[str, Any] = {"color": "black", "linestyle": BASELINES.get(row["label"], "-"), "linewidth": 1.2}
        if row["label"] not in BASELINES:
            style |= {"color": next(colours), "linewidth": 1.6}
        _plot(by_bytes, row, "bytes", "metric", style)
        _plot(by_time, row, "time_s", "metric", style)
        if row["method"] == "gossip":
            for axes, curve in zip(right, curves, strict=True):
                _plot(axes, row, "bytes", curve, style)
    by_bytes.set(xlabel=LABELS["bytes"], ylabel=f"{metric} of the averaged model")
    by_time.set(xlabel=LABELS["time_s"])
    for axes in (by_bytes, by_time):
        if metric == "accuracy":
            axes.set_yscale("logit")  # accuracies near 1 are told apart by their errors, and the others are not cut
            axes.yaxis.set_major_locator(FixedLocator([0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99]))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.yaxis.set_minor_formatter(NullFormatter())
        if (target := document["metric"].get("target")) is not None:
            axes.axhline(target, color="0.6", linestyle=":", linewidth=1)
    for axes, name in zip(right, curves.values(), strict=True):
        axes.set(yscale="log", xlabel=LABELS["bytes"], ylabel=name)
    for axes in (by_bytes, by_time, *right):
        axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    handles, labels = by_bytes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"{document['title']}, {world_size} ranks", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _plot(axes: Axes, row: dict[str, Any], against: str, curve: str, style: dict[str, Any]) -> None:
    curves = row["curves"]
    pairs = zip(curves[against], curves[curve], strict=True)
    points = [(place / UNITS[against], value) for place, value in pairs if place and value]
    if points:
        axes.plot(*zip(*points, strict=True), label=row["label"], **style)
    elif (values := [value for value in curves[curve] if value is not None]) and row["label"] in BASELINES:
        axes.axhline(values[-1], label=f"{row['label']} (0 bytes)", **style)


def main() -> None:
    """Read, draw."""
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    document = json.loads((Path(sys.argv[1]) / "results.json").read_text(encoding="utf-8"))
    sizes = sorted({row["world_size"] for row in document["rows"]})
    chosen = int(sys.argv[3]) if len(sys.argv) == 4 else max(sizes, default=0)
    if chosen not in sizes:
        sys.exit(f"there is no row with {chosen} ranks; there are {', '.join(map(str, sizes)) or 'none'}")
    draw(document, chosen, Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")


if __name__ == "__main__":
    main()

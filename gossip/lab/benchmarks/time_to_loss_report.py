"""Curves of loss against seconds and bytes: when each reaches its target, as a table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, BeforeValidator

from gossip.lab.benchmarks.summaries import Spread, look, table
from gossip.lab.experiments.run_figures import drawn
from gossip.lab.probe.cluster_measuring import Measured

TOLERANCE = 0.01
_WAY = np.linspace(0, 1, 51)
EXPLANATION = """\
Median (lowest to highest) over the seeds that reached the target. Seconds: of training, evaluations of the averaged
model not counted. Of ...: the part of that method's seconds, with the same seed. Sent: by the interface, per rank."""


class Point(BaseModel):
    """One evaluation of the averaged model on held-out data: its loss, which is null in JSON if it is NaN.

    Until then, ``step`` steps, ``seconds`` of training without evaluations, and the bytes that a rank has sent.
    """

    step: int
    seconds: float
    sent_bytes: float
    loss: Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]


class Curve(BaseModel):
    """The evaluations of one method's training from one seed."""

    method: str
    seed: int
    points: list[Point]

    def reached(self, target: float) -> Point | None:
        """Return the first evaluation with at most this loss, or None if there is none."""
        return next((point for point in self.points if point.loss <= target), None)


class LossResult(BaseModel):
    """The results of one task on one kind of link.

    The references are methods with which seconds are compared, all-reduce first. ``step_s`` is the mean step time of
    all-reduce; the probe has that of a step without communication while all ranks compute. Its advice is empty unless
    asked for.
    """

    task: str
    link: str
    curves: list[Curve]
    references: list[str]
    step_s: float
    probe: Measured
    advice: str

    def targets(self) -> dict[int, float]:
        """Return the loss to be reached from each seed."""
        return {each.seed: target_of(each.points) for each in self.curves if each.method == self.references[0]}


def target_of(reference: Sequence[Point]) -> float:
    """Return the target: the loss at the end of all-reduce's training plus 1 %."""
    return (1 + TOLERANCE) * reference[-1].loss


def section(result: LossResult) -> list[str]:
    """Return the heading, what a step takes, the advice of the probe, and the table of a result."""
    targets, compute_s = result.targets(), result.probe.workload.compute_s
    found: dict[str, dict[int, Point]] = {curve.method: {} for curve in result.curves}
    for curve in result.curves:
        if (point := curve.reached(targets[curve.seed])) is not None:
            found[curve.method][curve.seed] = point
    of_references = [found[label] for label in result.references]
    cells = (
        [
            method,
            f"{len(points)} of {len(targets)}",
            _words([point.seconds for point in points.values()], ".2f"),
            *(
                _words([point.seconds / of[seed].seconds for seed, point in points.items() if seed in of], ".3f")
                for of in of_references
            ),
            _words([point.step for point in points.values()], ".0f"),
            _words([point.sent_bytes for point in points.values()], ".1f", 1e-6),
        ]
        for method, points in found.items()
    )
    titles = ["method", "reached", "seconds", *(f"of {label}'s" for label in result.references), "steps", "sent, MB"]
    return [
        f"## {result.task}, {result.link}",
        f"All-reduce's step: {1e3 * result.step_s:.0f} ms; computing alone, on all ranks at once: "
        f"{1e3 * compute_s:.0f} ms ({compute_s / result.step_s:.0%}).",
        f"The probe: {result.advice}" if result.advice else "",
        table(titles, cells),
    ]


def _words(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    return Spread.over(values).shown(form, factor) if values else "not reached"


def loss_figure(results: Sequence[LossResult], path: Path) -> None:
    """Draw a row of two panels per result: what the way to the target took, as a median over the seeds in their range.

    The way is that of the loss's logarithm, from all-reduce's first evaluation to the target of the seed. A line ends
    where not all seeds got further. The axis of bytes begins at the bytes per step of the method that sends least,
    because next to nothing is sent before the first exchange.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    with drawn(path, 9.2, 2.9 * len(results) + 0.6) as figure:
        panels = figure.subplots(len(results), 2, sharey="row", squeeze=False)
        for (seconds, sent), result in zip(panels, results, strict=True):
            firsts = {each.seed: each.points[0] for each in result.curves if each.method == result.references[0]}
            ways = {seed: np.geomspace(firsts[seed].loss, end, len(_WAY)) for seed, end in result.targets().items()}
            for number, label in enumerate(dict.fromkeys(each.method for each in result.curves)):
                of_seeds = [each for each in result.curves if each.method == label]
                found = [[curve.reached(loss) for loss in ways[curve.seed]] for curve in of_seeds]
                for axes, quantity, unit in ((seconds, "seconds", 1.0), (sent, "sent_bytes", 1e6)):
                    costs = [[getattr(point, quantity, math.nan) / unit for point in points] for points in found]
                    low, median, high = np.quantile(costs, (0, 0.5, 1), axis=0)
                    style = look(number)
                    axes.plot(median, _WAY, **style, label=label)
                    axes.fill_betweenx(_WAY, low, high, color=style["color"], alpha=0.12, linewidth=0)
            step_bytes = [curve.points[-1].sent_bytes / curve.points[-1].step for curve in result.curves]
            if smallest := min(filter(None, step_bytes), default=None):
                sent.set_xlim(left=smallest / 1e6)
            for axes, quantity in ((seconds, "seconds of training"), (sent, "MB sent per rank")):
                axes.set(xscale="log", xlabel=quantity, ylim=(0, 1))
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(NullFormatter())
            seconds.yaxis.set_major_formatter("{x:.0%}")
            seconds.set_ylabel("way to the target loss")
            seconds.set_title(f"{result.task}, {result.link}")
            seeds = f"median and range of {len(ways)} seeds" if len(ways) > 1 else "one seed"
            sent.set_title(seeds, loc="right", fontsize=8.5, fontweight="normal")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

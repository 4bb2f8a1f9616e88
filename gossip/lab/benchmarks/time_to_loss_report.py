"""Curves of loss against seconds and bytes: when each reaches its target, as a table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from gossip.lab.benchmarks.bench_methods import MethodSpecification
from gossip.lab.benchmarks.step_time_figures import look
from gossip.lab.benchmarks.summaries import Spread, table
from gossip.lab.experiments.run_figures import STYLE, import_matplotlib, save
from gossip.lab.probe import Measured

TOLERANCE = 0.01
EXPLANATION = """\
Median (lowest to highest) over the seeds that reached the target. Seconds: of training, evaluations of the averaged
model not counted. Of ...: the part of that method's seconds, with the same seed. Sent: by the interface, per rank.
Predicted: steps of virtual workers from the first seed times the step that the simulation predicts."""


class Point(BaseModel):
    """One evaluation of the averaged model.

    Attributes
    ----------
    step : int
        The number of steps made before the evaluation.
    seconds : float
        The training time until then, without evaluations.
    sent_bytes : float
        The bytes sent per rank in training until then, as counted by the network interface.
    loss : float
        The loss on held-out data; NaN is null in JSON.
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


class LossRow(BaseModel):
    """The cost for one method to reach the target.

    Attributes
    ----------
    label, kind : str
    num_reached : int
        The number of seeds with which it reached the target. The other figures are over these seeds, and None without
        any.
    seconds, steps, sent_bytes : Spread or None
        The seconds, steps and bytes until the target was reached.
    of_reference : mapping of str to Spread
        By the label of a reference, the ratio of the method's seconds to the reference's with the same seed.
    predicted_s : float or None
    """

    label: str
    kind: str
    num_reached: int
    seconds: Spread | None
    steps: Spread | None
    sent_bytes: Spread | None
    of_reference: dict[str, Spread]
    predicted_s: float | None


class LossResult(BaseModel):
    """The results of one task on one kind of link.

    Attributes
    ----------
    task, link : str
    curves : list of Curve
    rows : list of LossRow
    step_s : float
        The mean step time of all-reduce.
    compute_s : float
        The probed time of a step without communication, while all ranks compute.
    probe : Measured
        The measured cluster and workload.
    advice : str
        The advice of the probe; empty if it was not asked.
    """

    task: str
    link: str
    curves: list[Curve]
    rows: list[LossRow]
    step_s: float
    compute_s: float
    probe: Measured
    advice: str


def target_of(reference: Sequence[Point]) -> float:
    """Return the target: the loss at the end of all-reduce's training plus 1 %."""
    return (1 + TOLERANCE) * reference[-1].loss


def rows_of(
    methods: Sequence[MethodSpecification], curves: Sequence[Curve], predicted_s: Mapping[str, float]
) -> list[LossRow]:
    """Return one row per method, in the order of ``methods``.

    Parameters
    ----------
    methods : sequence of MethodSpecification
        The methods, the first of which is all-reduce.
    curves : sequence of Curve
        The curves of every method from every seed.
    predicted_s : mapping
        The predicted seconds by label; methods may be missing.
    """
    targets = {curve.seed: target_of(curve.points) for curve in curves if curve.method == methods[0].label}
    points = {
        (curve.method, curve.seed): point
        for curve in curves
        if (point := curve.reached(targets[curve.seed])) is not None
    }
    references = [methods[0].label, *(method.label for method in methods if method.kind == "decent_dp")]
    rows = []
    for method in methods:
        found = {seed: point for (label, seed), point in points.items() if label == method.label}
        ratios = {
            label: [
                point.seconds / points[label, seed].seconds for seed, point in found.items() if (label, seed) in points
            ]
            for label in references
        }
        rows.append(
            LossRow(
                label=method.label,
                kind=method.kind,
                num_reached=len(found),
                seconds=_spread([point.seconds for point in found.values()]),
                steps=_spread([float(point.step) for point in found.values()]),
                sent_bytes=_spread([point.sent_bytes for point in found.values()]),
                of_reference={label: Spread.over(values) for label, values in ratios.items() if values},
                predicted_s=predicted_s.get(method.label),
            )
        )
    return rows


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.over(values) if values else None


def section(result: LossResult) -> list[str]:
    """Return the heading, what a step takes, the advice of the probe, and the table of a result."""
    references = list(dict.fromkeys(label for row in result.rows for label in row.of_reference))
    num_seeds = len({curve.seed for curve in result.curves})
    cells = (
        [
            row.label,
            f"{row.num_reached} of {num_seeds}",
            _words(row.seconds, ".2f"),
            *(_words(row.of_reference.get(label), ".3f") for label in references),
            _words(row.steps, ".0f"),
            _words(row.sent_bytes, ".1f", 1e-6),
            "" if row.predicted_s is None else f"{row.predicted_s:.2f}",
        ]
        for row in result.rows
    )
    of_references = [f"of {label}'s" for label in references]
    return [
        f"## {result.task}, {result.link}",
        f"All-reduce's step: {1e3 * result.step_s:.0f} ms; computing alone, on all ranks at once: "
        f"{1e3 * result.compute_s:.0f} ms ({result.compute_s / result.step_s:.0%}).",
        f"The probe: {result.advice}" if result.advice else "",
        table(["method", "reached", "seconds", *of_references, "steps", "sent, MB", "predicted, s"], cells),
    ]


def _words(spread: Spread | None, form: str, factor: float = 1.0) -> str:
    if spread is None:
        return "not reached"
    median, low, high = (format(factor * value, form) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low} to {high})"


def loss_figure(results: Sequence[LossResult], path: Path) -> None:
    """Draw a row of two panels per result: every seed's curve, and the target of the first seed.

    The axis of bytes begins at the bytes per step of the method that sends least, because next to nothing is sent
    before the first exchange.

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
                label = curve.method if curve.seed == result.curves[0].seed else None
                style = {**look(labels.index(curve.method)), "linewidth": 1.2, "label": label}
                losses = [point.loss for point in curve.points]
                seconds.plot([point.seconds for point in curve.points], losses, **style)
                sent.plot([point.sent_bytes / 1e6 for point in curve.points], losses, **style)
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
            seconds.set_ylabel("loss of the averaged model")
            seconds.set_title(f"{result.task}, {result.link}")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save(figure, path)

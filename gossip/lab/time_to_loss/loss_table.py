"""Aggregation of curves into one row per method, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gossip.lab.benchmarks.bench_report import Spread
from gossip.lab.benchmarks.bench_specification import MethodSpecification
from gossip.lab.time_to_loss.loss_curves import Curve, target_of


@dataclass(frozen=True)
class LossRow:
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
    of_reference: Mapping[str, Spread]
    predicted_s: float | None


@dataclass(frozen=True)
class LossResult:
    """The results of one task on one kind of link.

    Attributes
    ----------
    task, link : str
    curves : sequence of Curve
    rows : sequence of LossRow
    step_s : float
        The mean step time of all-reduce.
    compute_s : float
        The probed time of a step without communication, while all ranks compute.
    probe : mapping
        The measured cluster and workload.
    advice : str
        The advice of the probe; empty if it was not asked.
    """

    task: str
    link: str
    curves: Sequence[Curve]
    rows: Sequence[LossRow]
    step_s: float
    compute_s: float
    probe: Mapping[str, Any]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        return asdict(self)


def rows_of(
    methods: Sequence[MethodSpecification], curves: Sequence[Curve], predicted_s: Mapping[str, float | None]
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


def markdown(facts: Sequence[str], results: Sequence[LossResult]) -> str:
    """Return the whole report."""
    parts = ["# Time to all-reduce's final loss plus 1 %", "\n".join(f"- {fact}" for fact in facts)]
    for result in results:
        parts += [
            f"## {result.task}, {result.link}",
            f"All-reduce's step: {1e3 * result.step_s:.0f} ms; computing alone, on all ranks at once: "
            f"{1e3 * result.compute_s:.0f} ms ({result.compute_s / result.step_s:.0%}).",
            *([f"The probe: {result.advice}"] if result.advice else []),
            _table(result),
        ]
    parts.append(EXPLANATION)
    return "\n\n".join(parts) + "\n"


EXPLANATION = """\
Median (lowest to highest) over the seeds that reached the target. Seconds: of training, evaluations of the averaged
model not counted. Of ...: the part of that method's seconds, with the same seed. Sent: by the interface, per rank.
Predicted: steps of virtual workers from the first seed times the step that the simulation predicts."""


def _table(result: LossResult) -> str:
    references = list(dict.fromkeys(label for row in result.rows for label in row.of_reference))
    num_seeds = len({curve.seed for curve in result.curves})
    titles = ["reached", "seconds", *(f"of {label}'s" for label in references), "steps", "sent, MB", "predicted, s"]
    lines = [f"| method | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for row in result.rows:
        cells = [
            row.label,
            f"{row.num_reached} of {num_seeds}",
            _words(row.seconds, ".2f"),
            *(_words(row.of_reference.get(label), ".3f") for label in references),
            _words(row.steps, ".0f"),
            _words(row.sent_bytes, ".1f", 1e-6),
            "" if row.predicted_s is None else f"{row.predicted_s:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(spread: Spread | None, form: str, factor: float = 1.0) -> str:
    if spread is None:
        return "not reached"
    median, low, high = (format(factor * value, form) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low} to {high})"

"""The report of a benchmark as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossip.lab.benchmarks.bench_report import REFERENCES, Ratio, Row, Spread, reference_of


@dataclass(frozen=True)
class Result:
    """The measurements at one link rate.

    Attributes
    ----------
    rate : str or None
        The rate of the links; None if they are unshaped.
    goodput_bytes_per_s : float or None
        The goodput of plain TCP per rank in each direction, while both directions are used.
    rows, ratios : sequence
    """

    rate: str | None
    goodput_bytes_per_s: float | None
    rows: Sequence[Row]
    ratios: Sequence[Ratio]

    @property
    def title(self) -> str:
        """The rate as the heading of a section."""
        return "unshaped" if self.rate is None else f"links of {self.rate}"


def markdown(heading: str, facts: Sequence[str], results: Sequence[Result]) -> str:
    """Return the whole report."""
    parts = [f"# {heading}", "\n".join(f"- {fact}" for fact in facts)]
    for result in results:
        parts += [f"## {result.title[0].upper()}{result.title[1:]}"]
        if result.goodput_bytes_per_s is not None:
            parts.append(
                f"Goodput of plain TCP: {result.goodput_bytes_per_s / 1e6:.4g} MB/s per rank, each way at once "
                f"({8e-6 * result.goodput_bytes_per_s:.4g} Mbit/s)."
            )
        parts += [cost_table(result.rows), ratio_table(result)]
    parts.append(EXPLANATION)
    return "\n\n".join(part for part in parts if part) + "\n"


EXPLANATION = """\
Step: median and quartiles over steps and ranks. Throughput: steps by the last rank's end, median over the repetitions.
Compute is the step of `local`; exposed what the step takes longer than that; reported wait what the method itself
counted. Sent: by the interface, per rank and step. Efficiency: max(compute, bytes / goodput) / step. Memory: the most
above what the process held before it made the model. Loss: of the averaged model on held-out data after equal steps.
Ratios: median (lowest to highest) over pairs of the same repetition; a step ratio below 1 and a throughput ratio above
1 mean faster."""


def cost_table(rows: Sequence[Row]) -> str:
    """Return the table of costs, one line per method."""
    lines = [
        "| method | step, ms | quartiles | steps/s | compute, ms | exposed, ms | reported wait, ms | sent, MB "
        "| efficiency | peak memory, MB | final loss |",
        "| --- |" + " ---: |" * 10,
    ]
    for row in rows:
        cells = [
            row.label,
            _ms(row.step_s.median),
            f"{_ms(row.step_s.low)} to {_ms(row.step_s.high)}",
            f"{row.steps_per_s.median:.3g}",
            _ms(row.compute_s),
            _ms(row.exposed_s),
            _ms(row.reported_wait_s),
            f"{row.sent_bytes / 1e6:.2f}",
            "" if row.efficiency is None else f"{row.efficiency:.0%}",
            f"{row.peak_memory_bytes / 1e6:.0f}",
            "not finite" if row.final_loss is None else f"{row.final_loss:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(result: Result) -> str:
    """Return one line per method with two columns per reference; empty if the result has no reference."""
    references = [row for kind in REFERENCES if (row := reference_of(result.rows, kind)) is not None]
    if not references:
        return ""
    titles = [f"{what} to {row.label}" for row in references for what in ("step", "throughput")]
    lines = [f"| method | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    found = {(ratio.label, ratio.reference): ratio for ratio in result.ratios}
    for row in result.rows:
        cells = [row.label]
        for reference in references:
            ratio = found.get((row.label, reference.label))
            cells += ["1", "1"] if ratio is None else [_spread(ratio.step), _spread(ratio.throughput)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _spread(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"

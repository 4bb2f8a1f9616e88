"""Aggregation of the ranks' records into one row per method and its ratios to reference methods, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gossip.lab.benchmarks.bench_methods import MethodSpecification
from gossip.lab.benchmarks.benchmark import Records
from gossip.lab.benchmarks.summaries import Spread, table

REFERENCES = ("ddp", "decent_dp", "local")
EXPLANATION = """\
Step: median and quartiles over steps and ranks. Throughput: steps by the last rank's end, median over the repetitions.
Compute is the step of `local`; exposed what the step takes longer than that. Sent: by the interface, per rank and step.
Efficiency: max(compute, sent / goodput) / step. Memory: the most above what the process held before it made the model.
Loss: of the averaged model on held-out data after equal steps. Ratios: median (lowest to highest) over pairs of the
same repetition; a step ratio below 1 and a throughput ratio above 1 mean faster."""


class Row(BaseModel):
    """The measured cost of one method, in seconds and bytes.

    ``step_s`` is the time of single steps, over all ranks and repetitions. For each repetition there are the median
    step time over steps and ranks, and the time from the last rank's start to the last rank's end, divided by the
    number of steps, which gives the throughput. ``compute_s`` is the median step time of the method "local" in the same
    run, if the run has it, ``exposed_s`` what a step takes longer, and
    ``peak_memory_bytes`` the highest peak of any rank above its process's previous memory, the median over the
    repetitions. A ``final_loss`` that is not finite is None.
    """

    label: str
    kind: str
    options: dict[str, Any]
    step_s: Spread
    step_s_by_repetition: list[float]
    whole_s_by_repetition: list[float]
    steps_per_s: Spread
    compute_s: float | None
    exposed_s: float | None
    sent_bytes: float
    efficiency: float | None
    peak_memory_bytes: float
    final_loss: float | None


class StepTimeResult(BaseModel):
    """The measurements at one link rate, which is None if links are unshaped.

    The goodput is what a rank sends at most while it receives as much; None if all ranks are on one host.
    """

    rate: str | None
    goodput_bytes_per_s: float | None
    rows: list[Row]


def result_of(rate: str | None, methods: Sequence[MethodSpecification], records: Records) -> StepTimeResult:
    """Return one row per method, in the order of ``methods``."""
    goodput = records[0][0]["goodput_bytes_per_s"]
    found = {method.label: _repetitions_of(records, method.label) for method in methods}
    local = next((method.label for method in methods if method.kind == "local"), None)
    compute_s = None
    if local is not None:
        compute_s = statistics.median(time_s for of_all in found[local] for time_s in _step_times(of_all))
    rows = [_row(method, found[method.label], compute_s, goodput) for method in methods]
    return StepTimeResult(rate=rate, goodput_bytes_per_s=goodput, rows=rows)


def _repetitions_of(records: Records, label: str) -> list[list[Mapping[str, Any]]]:
    """Return the records of a method, of all ranks for each repetition."""
    found = [record for by_rank in records for record in by_rank if record.get("method") == label]
    numbers = sorted({record["repetition"] for record in found})
    return [[record for record in found if record["repetition"] == number] for number in numbers]


def _step_times(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [time_s for record in records for time_s in record["step_s"]]


def _row(method: MethodSpecification, repetitions: Records, compute_s: float | None, goodput: float | None) -> Row:
    everything = [record for of_all in repetitions for record in of_all]
    step_s, num_steps = Spread.quartiles(_step_times(everything)), len(everything[0]["step_s"])
    sent_bytes = statistics.mean(record["sent_bytes"] for record in everything) / num_steps
    whole_s = [
        (max(record["end_s"] for record in of_all) - max(record["start_s"] for record in of_all)) / num_steps
        for of_all in repetitions
    ]
    return Row(
        label=method.label,
        kind=method.kind,
        options=method.options,
        step_s=step_s,
        step_s_by_repetition=[statistics.median(_step_times(of_all)) for of_all in repetitions],
        whole_s_by_repetition=whole_s,
        steps_per_s=Spread.over([1 / each_s for each_s in whole_s]),
        compute_s=compute_s,
        exposed_s=None if compute_s is None else step_s.median - compute_s,
        sent_bytes=sent_bytes,
        efficiency=max(compute_s, sent_bytes / goodput) / step_s.median if compute_s and goodput else None,
        peak_memory_bytes=statistics.median(
            max(record["peak_memory_bytes"] for record in of_all) for of_all in repetitions
        ),
        final_loss=everything[0]["final_loss"],
    )


def references_of(rows: Sequence[Row]) -> list[Row]:
    """Return the ddp, decent_dp and local row with the highest throughput, without those that compress."""
    of_kinds = ([row for row in rows if row.kind == kind and "hook" not in row.options] for kind in REFERENCES)
    return [max(rows, key=lambda row: row.steps_per_s.median) for rows in of_kinds if rows]


def ratios_of(row: Row, reference: Row) -> tuple[Spread, Spread]:
    """Return the ratios of step time and of throughput to a reference's, over pairs of the same repetition."""
    steps = zip(row.step_s_by_repetition, reference.step_s_by_repetition, strict=True)
    wholes = zip(row.whole_s_by_repetition, reference.whole_s_by_repetition, strict=True)
    of_steps = Spread.over([own_s / baseline_s for own_s, baseline_s in steps])
    return of_steps, Spread.over([baseline_s / own_s for own_s, baseline_s in wholes])


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


_COSTS: Mapping[str, Callable[[Row], str]] = {
    "method": lambda row: row.label,
    "step, ms": lambda row: _ms(row.step_s.median),
    "quartiles": lambda row: f"{_ms(row.step_s.low)} to {_ms(row.step_s.high)}",
    "steps/s": lambda row: f"{row.steps_per_s.median:.3g}",
    "compute, ms": lambda row: _ms(row.compute_s),
    "exposed, ms": lambda row: _ms(row.exposed_s),
    "sent, MB": lambda row: f"{row.sent_bytes / 1e6:.2f}",
    "efficiency": lambda row: "" if row.efficiency is None else f"{row.efficiency:.0%}",
    "peak memory, MB": lambda row: f"{row.peak_memory_bytes / 1e6:.0f}",
    "final loss": lambda row: "not finite" if row.final_loss is None else f"{row.final_loss:.3f}",
}


def section(result: StepTimeResult) -> list[str]:
    """Return the heading, the goodput, the table of costs, and the table of ratios if the result has a reference."""
    goodput = result.goodput_bytes_per_s
    carried = "" if goodput is None else f"Goodput: {goodput / 1e6:.4g} MB/s ({8e-6 * goodput:.4g} Mbit/s) per rank"
    costs = table(list(_COSTS), ([cell(row) for cell in _COSTS.values()] for row in result.rows))
    references = references_of(result.rows)
    cells = [
        [
            row.label,
            *("1" if row is each else ratio.shown(".3f") for each in references for ratio in ratios_of(row, each)),
        ]
        for row in result.rows
    ]
    titles = ["method", *(f"{what} to {each.label}" for each in references for what in ("step", "throughput"))]
    return [
        "## Unshaped" if result.rate is None else f"## Links of {result.rate}",
        carried and f"{carried}, each way at once.",
        costs,
        table(titles, cells) if references else "",
    ]

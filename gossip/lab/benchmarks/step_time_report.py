"""Aggregation of the ranks' records into one row per method and its ratios to reference methods, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, computed_field

from gossip.lab.benchmarks.bench_methods import MethodSpecification
from gossip.lab.benchmarks.summaries import Spread, table

Records = Sequence[Sequence[Mapping[str, Any]]]
"""For each rank, its records of :meth:`gossip.lab.benchmarks.step_time.StepTime.work`."""
REFERENCES = ("ddp", "decent_dp", "local")
_UNCOMPRESSED = {"ddp": "hook"}
"""By kind of reference, the option that compresses its messages; rows with that option are not references."""
EXPLANATION = """\
Step: median and quartiles over steps and ranks. Throughput: steps by the last rank's end, median over the repetitions.
Compute is the step of `local`; exposed what the step takes longer than that; reported wait what the method itself
counted. Sent: by the interface, per rank and step. Efficiency: max(compute, bytes / goodput) / step. Memory: the most
above what the process held before it made the model. Loss: of the averaged model on held-out data after equal steps.
Ratios: median (lowest to highest) over pairs of the same repetition; a step ratio below 1 and a throughput ratio above
1 mean faster."""


class Row(BaseModel):
    """The measured cost of one method.

    Attributes
    ----------
    label, kind : str
    options : mapping
    step_s : Spread
        The time of single steps, over all ranks and repetitions.
    step_s_by_repetition : list of float
        For each repetition, the median step time over steps and ranks.
    whole_s_by_repetition : list of float
        For each repetition, the time from the last rank's start to the last rank's end, divided by the number of
        steps.
    compute_s : float or None
        The median step time of the method "local" in the same run; None if the run does not have it.
    exposed_s : float or None
        ``step_s.median`` - ``compute_s``: the time that communication adds.
    reported_wait_s : float or None
        The median time spent waiting for peers, as the method itself reports it.
    sent_bytes, received_bytes : float
        Bytes per rank and step, as counted by the network interfaces.
    efficiency : float or None
        max(``compute_s``, bytes / goodput) / ``step_s.median``, where bytes is the larger of those sent and received.
    peak_memory_bytes : float
        The highest peak of any rank above its process's previous memory; the median over the repetitions.
    final_loss : float or None
        The loss of the averaged model on held-out data, after the same number of steps for every method; None if it is
        not finite.
    """

    label: str
    kind: str
    options: dict[str, Any]
    step_s: Spread
    step_s_by_repetition: list[float]
    whole_s_by_repetition: list[float]
    compute_s: float | None
    exposed_s: float | None
    reported_wait_s: float | None
    sent_bytes: float
    received_bytes: float
    efficiency: float | None
    peak_memory_bytes: float
    final_loss: float | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def steps_per_s(self) -> Spread:
        """The throughput in steps per second, determined by the last rank."""
        return Spread.over([1 / whole_s for whole_s in self.whole_s_by_repetition])


class Ratio(BaseModel):
    """The ratios of a method's step time and throughput to a reference's, over pairs of the same repetition.

    A ``step`` below 1 and a ``throughput`` above 1 mean that the method is faster.
    """

    label: str
    reference: str
    step: Spread
    throughput: Spread


class StepTimeResult(BaseModel):
    """The measurements at one link rate.

    Attributes
    ----------
    rate : str or None
        The rate of the links; None if they are unshaped.
    goodput_bytes_per_s : float or None
        The goodput of plain TCP per rank in each direction, while both directions are used.
    rows, ratios : list
    """

    rate: str | None
    goodput_bytes_per_s: float | None
    rows: list[Row]
    ratios: list[Ratio]

    @property
    def title(self) -> str:
        """The rate as the heading of a section."""
        return "Unshaped" if self.rate is None else f"Links of {self.rate}"


def result_of(rate: str | None, methods: Sequence[MethodSpecification], records: Records) -> StepTimeResult:
    """Return one row per method, in the order of ``methods``, and all ratios."""
    measured = [each["goodput_bytes_per_s"] for by_rank in records for each in by_rank if "method" not in each]
    goodput = statistics.median(known) if (known := [value for value in measured if value is not None]) else None
    compute_s = next(
        (statistics.median(_step_times(_of(records, method.label))) for method in methods if method.kind == "local"),
        None,
    )
    rows = [_row(method, _of(records, method.label), compute_s, goodput) for method in methods]
    return StepTimeResult(rate=rate, goodput_bytes_per_s=goodput, rows=rows, ratios=ratios_of(rows))


def _row(
    method: MethodSpecification,
    records: Records,
    compute_s: float | None,
    goodput_bytes_per_s: float | None,
) -> Row:
    repetitions = list(zip(*records, strict=True))  # for each repetition, one record per rank
    step_s = Spread.quartiles(_step_times(records))
    everything = [record for by_rank in repetitions for record in by_rank]
    num_steps = len(everything[0]["step_s"])
    sent = statistics.mean(record["sent_bytes"] for record in everything) / num_steps
    received = statistics.mean(record["received_bytes"] for record in everything) / num_steps
    waits = [wait for record in everything for wait in record["exposed_wait_s"] if wait is not None]
    efficiency = None
    if compute_s is not None and goodput_bytes_per_s is not None:
        efficiency = max(compute_s, max(sent, received) / goodput_bytes_per_s) / step_s.median
    return Row(
        label=method.label,
        kind=method.kind,
        options=method.options,
        step_s=step_s,
        step_s_by_repetition=[
            statistics.median(time_s for record in by_rank for time_s in record["step_s"]) for by_rank in repetitions
        ],
        whole_s_by_repetition=[
            (max(record["end_s"] for record in by_rank) - max(record["start_s"] for record in by_rank)) / num_steps
            for by_rank in repetitions
        ],
        compute_s=compute_s,
        exposed_s=None if compute_s is None else step_s.median - compute_s,
        reported_wait_s=statistics.median(waits) if waits else None,
        sent_bytes=sent,
        received_bytes=received,
        efficiency=efficiency,
        peak_memory_bytes=statistics.median(
            max(record["peak_memory_bytes"] for record in by_rank) for by_rank in repetitions
        ),
        final_loss=everything[0]["final_loss"],
    )


def ratios_of(rows: Sequence[Row]) -> list[Ratio]:
    """Compare every row with the fastest ddp, decent_dp and local row of the run, as far as the run has them.

    A ddp row with a hook that compresses is not a reference. The fastest row is the one with the highest throughput.
    """
    return [_ratio(row, reference) for reference in references_of(rows) for row in rows if row is not reference]


def references_of(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row of each kind of reference that does not compress its messages."""
    of_kinds = (
        [row for row in rows if row.kind == kind and _UNCOMPRESSED.get(kind) not in row.options] for kind in REFERENCES
    )
    return [max(rows, key=lambda row: row.steps_per_s.median) for rows in of_kinds if rows]


def _ratio(row: Row, reference: Row) -> Ratio:
    steps = zip(row.step_s_by_repetition, reference.step_s_by_repetition, strict=True)
    wholes = zip(row.whole_s_by_repetition, reference.whole_s_by_repetition, strict=True)
    return Ratio(
        label=row.label,
        reference=reference.label,
        step=Spread.over([own_s / baseline_s for own_s, baseline_s in steps]),
        throughput=Spread.over([baseline_s / own_s for own_s, baseline_s in wholes]),
    )


def _of(records: Records, label: str) -> list[list[Mapping[str, Any]]]:
    found = [
        sorted((row for row in by_rank if row.get("method") == label), key=lambda record: int(record["repetition"]))
        for by_rank in records
    ]
    assert all(found), f"no record of {label}"
    return found


def _step_times(records: Records) -> list[float]:
    return [time_s for by_rank in records for record in by_rank for time_s in record["step_s"]]


def section(result: StepTimeResult) -> list[str]:
    """Return the heading, the goodput, the table of costs, and the table of ratios if the result has a reference."""
    goodput = result.goodput_bytes_per_s
    carried = goodput is not None and (
        f"Goodput of plain TCP: {goodput / 1e6:.4g} MB/s per rank, each way at once ({8e-6 * goodput:.4g} Mbit/s)."
    )
    return [f"## {result.title}", carried or "", _cost_table(result.rows), _ratio_table(result)]


def _cost_table(rows: Sequence[Row]) -> str:
    titles = [
        "method",
        "step, ms",
        "quartiles",
        "steps/s",
        "compute, ms",
        "exposed, ms",
        "reported wait, ms",
        "sent, MB",
    ]
    cells = (
        [
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
        for row in rows
    )
    return table([*titles, "efficiency", "peak memory, MB", "final loss"], cells)


def _ratio_table(result: StepTimeResult) -> str:
    references = [row.label for row in references_of(result.rows)]
    if not references:
        return ""
    found = {(ratio.label, ratio.reference): ratio for ratio in result.ratios}
    cells = (
        [row.label, *(cell for label in references for cell in _ratio_cells(found.get((row.label, label))))]
        for row in result.rows
    )
    return table(["method", *(f"{what} to {label}" for label in references for what in ("step", "throughput"))], cells)


def _ratio_cells(ratio: Ratio | None) -> list[str]:
    spreads = [] if ratio is None else [ratio.step, ratio.throughput]
    return [f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})" for spread in spreads] or ["1", "1"]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"

"""Aggregation of the ranks' records into one row per method and its ratios to reference methods."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gossip.lab.benchmarks.bench_specification import MethodSpecification

Records = Sequence[Sequence[Mapping[str, Any]]]
"""For each rank, the records that :meth:`gossip.lab.benchmarks.step_measuring.Measurement.measure` returned."""
REFERENCES = ("ddp", "decent_dp", "local")
_UNCOMPRESSED = {"ddp": "hook"}
"""By kind of reference, the option that compresses its messages; rows with that option are not references."""


@dataclass(frozen=True)
class Spread:
    """A median with a range: quartiles over steps and ranks, or the lowest and highest value over repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> Spread:
        """Return the median and the quartiles of many values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Return the median, the lowest and the highest value, for example over repetitions."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """The measured cost of one method.

    Attributes
    ----------
    label, kind : str
    options : mapping
    step_s : Spread
        The time of single steps, over all ranks and repetitions.
    step_s_by_repetition : tuple of float
        For each repetition, the median step time over steps and ranks.
    whole_s_by_repetition : tuple of float
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
    options: Mapping[str, Any]
    step_s: Spread
    step_s_by_repetition: tuple[float, ...]
    whole_s_by_repetition: tuple[float, ...]
    compute_s: float | None
    exposed_s: float | None
    reported_wait_s: float | None
    sent_bytes: float
    received_bytes: float
    efficiency: float | None
    peak_memory_bytes: float
    final_loss: float | None

    @property
    def steps_per_s(self) -> Spread:
        """The throughput in steps per second, determined by the last rank."""
        return Spread.over([1 / whole_s for whole_s in self.whole_s_by_repetition])


@dataclass(frozen=True)
class Ratio:
    """The ratios of a method's step time and throughput to a reference's, over pairs of the same repetition.

    A ``step`` below 1 and a ``throughput`` above 1 mean that the method is faster.
    """

    label: str
    reference: str
    step: Spread
    throughput: Spread


def rows_of(records: Records, methods: Sequence[MethodSpecification], goodput_bytes_per_s: float | None) -> list[Row]:
    """Return one row per method, in the order of ``methods``."""
    compute_s = None
    for method in methods:
        if method.kind == "local":
            compute_s = statistics.median(_step_times(_of(records, method.label)))
            break
    return [_row(method, _of(records, method.label), compute_s, goodput_bytes_per_s) for method in methods]


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
        step_s_by_repetition=tuple(
            statistics.median(time_s for record in by_rank for time_s in record["step_s"]) for by_rank in repetitions
        ),
        whole_s_by_repetition=tuple(
            (max(record["end_s"] for record in by_rank) - max(record["start_s"] for record in by_rank)) / num_steps
            for by_rank in repetitions
        ),
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
    ratios = []
    for kind in REFERENCES:
        reference = reference_of(rows, kind)
        if reference is not None:
            ratios += [_ratio(row, reference) for row in rows if row is not reference]
    return ratios


def reference_of(rows: Sequence[Row], kind: str) -> Row | None:
    """Return the fastest row of a kind that does not compress its messages, or None if there is none."""
    candidates = [row for row in rows if row.kind == kind and _UNCOMPRESSED.get(kind) not in row.options]
    return max(candidates, key=lambda row: row.steps_per_s.median, default=None)


def _ratio(row: Row, reference: Row) -> Ratio:
    steps = zip(row.step_s_by_repetition, reference.step_s_by_repetition, strict=True)
    wholes = zip(row.whole_s_by_repetition, reference.whole_s_by_repetition, strict=True)
    return Ratio(
        label=row.label,
        reference=reference.label,
        step=Spread.over([own_s / baseline_s for own_s, baseline_s in steps]),
        throughput=Spread.over([baseline_s / own_s for own_s, baseline_s in wholes]),
    )


def as_dict(rows: Sequence[Row], ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Return rows and ratios as plain data for JSON."""
    return {
        "rows": [{**asdict(row), "steps_per_s": asdict(row.steps_per_s)} for row in rows],
        "ratios": [asdict(ratio) for ratio in ratios],
    }


def _of(records: Records, label: str) -> list[list[Mapping[str, Any]]]:
    found = [
        sorted((row for row in by_rank if row.get("method") == label), key=lambda record: int(record["repetition"]))
        for by_rank in records
    ]
    assert all(found), f"no record of {label}"
    return found


def _step_times(records: Records) -> list[float]:
    return [time_s for by_rank in records for record in by_rank for time_s in record["step_s"]]

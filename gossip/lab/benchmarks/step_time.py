"""The time, bytes and memory of a step of each method (configs/bench.yaml).

Steps are predicted, too, by :func:`gossip.simulate_time` from a probe of the same ranks: of these, and of many more
nodes. Nothing is fitted to the steps that are measured.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, TypeAdapter, model_validator

from gossip import Workload, simulate_time
from gossip.lab.benchmarks.bench_methods import MethodSpecification, gossip_arguments, sgd
from gossip.lab.benchmarks.benchmark import (
    Benchmark,
    ComparisonSettings,
    Links,
    Place,
    Record,
    Records,
    Spread,
    Write,
    table,
)
from gossip.lab.benchmarks.network.counters import PeakMemory, interface_bytes
from gossip.lab.benchmarks.workloads import WORKLOADS, loss_of
from gossip.lab.experiments.run_figures import drawn, look
from gossip.lab.experiments.validated_models import OneOf
from gossip.lab.probe.cluster_measuring import Measured, measure, measure_links
from gossip.lab.probe.compute_probe import COMPRESSION_RATIOS

_MESSAGE_BYTES = 4_000_000  # with which the goodput is measured
_MEAN_DELAY_S = 0.05
BUCKET_CAP_MB = 25.0
"""With which ranks are probed; other buckets are not predicted."""
_NODES = 8, 16, 32, 64, 128, 256, 512, 1024
_LARGER = 1.3e9, 7e9
"""Numbers of parameters."""
_NUM_STEPS = 24
_PLAIN = {"local": "none", "ddp": "ddp", "fsdp": "fsdp"}
_OF_GOSSIP = {"topology", "algorithm", "compression"}
STRAGGLERS = {
    "none": "no delays",
    "exponential": "exponentially distributed delays with a mean of 50 ms on every rank and step",
    "one_slow": "rank 0 takes twice the time of its computation",
    "half_speed": "50 ms on every rank and step, but 100 ms on rank 0, as if devices computed meanwhile",
}

REFERENCES = ("ddp", "decent_dp", "local")
EXPLANATION = """\
Step: median and quartiles over steps and ranks. Throughput: steps by the last rank's end, median over the repetitions.
Compute is the step of `local`; exposed what the step takes longer than that. Sent: by the interface, per rank and step.
Efficiency: max(compute, sent / goodput) / step. Memory: the most above what the process held before it made the model.
Loss: of the averaged model on held-out data after equal steps. Ratios: median (lowest to highest) over pairs of the
same repetition; a step ratio below 1 and a throughput ratio above 1 mean faster."""


class StepTimeSettings(ComparisonSettings):
    """The settings of a benchmark of steps; each link has a table of its own.

    ``model`` is a key of :data:`gossip.lab.benchmarks.workloads.WORKLOADS`, ``straggler`` of
    :data:`STRAGGLERS`. The numbers of steps are those of every method and repetition; the
    seed is that of the initial values, the batches and the delays. If it ``predicts``, the ranks are probed first.
    """

    links: Links = Field(alias="rate")
    model: Annotated[str, OneOf(WORKLOADS)]
    straggler: Annotated[str, OneOf(STRAGGLERS)]
    repetitions: int = Field(ge=1)
    warmup_steps: int = Field(ge=2)
    steps: int = Field(ge=1)
    seed: int = Field(ge=0)
    predicts: bool

    @model_validator(mode="after")
    def _check_links(self) -> Self:
        if self.network == "loopback" and len(self.links) > 1:
            raise ValueError(f"rate={list(self.links)}: bench.network=loopback has no rate; set bench.network=lab")
        return self


class Row(BaseModel):
    """The measured cost of one method, in seconds and bytes.

    ``step_s`` is the time of single steps, over all ranks and repetitions. For each repetition there are the median
    step time over steps and ranks, and the time from the last rank's start to the last rank's end, divided by the
    number of steps, which gives the throughput. ``compute_s`` is the median step time of the method "local" in the same
    run, if the run has it, ``exposed_s`` what a step takes longer, and
    ``peak_memory_bytes`` the highest peak of any rank above its process's previous memory, the median over the
    repetitions. A ``final_loss`` that is not finite is None, as is a step that is not ``predicted_s``.
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
    predicted_s: float | None


class StepTimeResult(BaseModel):
    """The measurements at one link rate, which is None if links are unshaped, and what was probed for predictions.

    The goodput is what a rank sends at most while it receives as much; None if all ranks are on one host.
    """

    rate: str | None
    goodput_bytes_per_s: float | None
    rows: list[Row]
    probe: Measured | None = None


class StepTime(Benchmark[StepTimeSettings, StepTimeResult]):
    """All methods in turns, from the same initial values and batches, in every second repetition in reverse order."""

    settings = StepTimeSettings
    title = "Benchmark"
    explanation = EXPLANATION
    files = ("bench.json", "bench.md")

    def work(self, case: StepTimeSettings, place: Place, write: Write) -> None:
        """Write the goodput of the links between hosts, and then a record of every method in every repetition."""
        links = measure_links(_MESSAGE_BYTES, torch.device("cpu"))
        speeds = [each.bytes_per_s for each in links if each.rank // case.local_size != each.peer // case.local_size]
        differ = case.last_link is not None or case.far_link is not None
        write({"goodput_bytes_per_s": statistics.median(speeds) if speeds and not differ else None})
        if case.predicts:
            workload = WORKLOADS[case.model]
            batches = itertools.cycle(workload.batches(case.seed, place.rank))
            module, optimizer = workload.initial_module(case.seed), sgd(workload.learning_rate)
            probe = measure(module, lambda _: loss_of(module, next(batches)), optimizer, bucket_cap_mb=BUCKET_CAP_MB)
            write({"probe": asdict(probe)})
        measurement = Measurement(case, place)
        for repetition in range(case.repetitions):
            for method in case.methods[:: -1 if repetition % 2 else 1]:
                write(measurement.measure(method, repetition))

    def progress(self, case: StepTimeSettings, number: int, record: Record) -> str | None:
        if "method" not in record:
            return None
        median_ms = 1e3 * statistics.median(record["step_s"])
        total = len(case.methods) * case.repetitions
        return f"{number}/{total} {record['method']}: {median_ms:.1f} ms a step on rank 0"

    def result(self, case: StepTimeSettings, records: Records) -> StepTimeResult:
        return result_of(case.link, case.methods, records)

    def facts(self, settings: StepTimeSettings) -> list[str]:
        each_host = f", {settings.local_size} on each host" if settings.local_size > 1 else ""
        return [
            f"Model {settings.model}, {settings.world_size} ranks on {settings.network}{each_host}, "
            f"{settings.num_threads} thread{'s' * (settings.num_threads > 1)} each, SGD with momentum 0.9.",
            f"{settings.repetitions} repetitions of {settings.steps} steps after {settings.warmup_steps} of warm-up; "
            f"delays: {settings.straggler}.",
        ]

    def sections(self, results: Sequence[StepTimeResult]) -> list[str]:
        return [part for result in results for part in section(result)]

    def draw(self, settings: StepTimeSettings, results: Sequence[StepTimeResult], folder: Path) -> None:
        """Draw what is predicted of more nodes and larger models, from a probe of the first links if all are equal."""
        if (probe := results[0].probe) is not None and probe.cluster.pair_seconds_per_byte is None:
            draw_scaled(probe, settings.methods, results[0].rate or settings.network, folder / "predicted.svg")


def straggler_delay_s(kind: str, place: Sequence[int], compute_s: float) -> float:
    """Return how long a rank sleeps before a step, in seconds, by a key of :data:`STRAGGLERS`; alike for all methods.

    The place is (seed, repetition, rank, step), which determines a random delay, and ``compute_s`` the time of a step
    without communication.
    """
    is_slow = place[2] == 0
    if kind == "exponential":
        return float(np.random.default_rng(place).exponential(_MEAN_DELAY_S))
    if kind == "half_speed":
        return _MEAN_DELAY_S * (2 if is_slow else 1)
    return compute_s if kind == "one_slow" and is_slow else 0.0


class Measurement:
    """A measurement of methods one after another, from the same initial values and batches. Collective."""

    def __init__(self, case: StepTimeSettings, place: Place) -> None:
        self._case, self._place = case, place
        self._workload = WORKLOADS[case.model]
        self._optimizer = sgd(self._workload.learning_rate)
        self._batches = self._workload.batches(case.seed, place.rank)
        self._compute_s = 0.0
        if case.straggler == "one_slow":  # the time of a step without communication, while all ranks compute
            local = MethodSpecification(label="local", kind="local", options={})
            self._compute_s = statistics.median(self.measure(local, 0)["step_s"])

    def measure(self, method: MethodSpecification, repetition: int) -> Record:
        """Measure the cost of a method on this rank.

        ``start_s`` and ``end_s`` are readings of a clock that all processes of a machine share.
        """
        case, place = self._case, self._place
        memory = PeakMemory()
        module = self._workload.initial_module(case.seed)
        running = method.start(module, self._optimizer, case.timeout_s)
        dist.barrier()
        batches = itertools.cycle(self._batches)
        for _ in range(case.warmup_steps):
            running.step(next(batches))
        # No barrier here: messages in flight would arrive meanwhile, and their bytes and waits would not be counted.
        (_, sent_before), start_s = interface_bytes(place.interface), time.monotonic()
        step_s: list[float] = []
        for step in range(case.steps):
            delay_s = straggler_delay_s(case.straggler, [case.seed, repetition, place.rank, step], self._compute_s)
            step_start_s = time.perf_counter()
            time.sleep(delay_s)
            running.step(next(batches))
            step_s.append(time.perf_counter() - step_start_s)
        end_s = time.monotonic()
        sent_bytes = (interface_bytes(place.interface)[1] - sent_before) / place.num_sharing
        peak_bytes = memory.bytes()
        dist.barrier()
        final_loss = None  # of the mean of the replicas, on the held-out batch
        if repetition == 0:
            with torch.no_grad(), running.averaged():
                final_loss = float(loss_of(module.eval(), self._workload.held_out(case.seed)))
        running.close()
        del running
        gc.collect()
        return {
            "method": method.label,
            "repetition": repetition,
            "start_s": start_s,
            "end_s": end_s,
            "step_s": step_s,
            "sent_bytes": sent_bytes,
            "peak_memory_bytes": peak_bytes,
            "final_loss": final_loss,
        }


def result_of(rate: str | None, methods: Sequence[MethodSpecification], records: Records) -> StepTimeResult:
    """Return one row per method, in the order of ``methods``."""
    goodput = records[0][0]["goodput_bytes_per_s"]
    found = {method.label: _repetitions_of(records, method.label) for method in methods}
    local = next((method.label for method in methods if method.kind == "local"), None)
    compute_s = None
    if local is not None:
        compute_s = statistics.median(time_s for of_all in found[local] for time_s in _step_times(of_all))
    probe = next((TypeAdapter(Measured).validate_python(each["probe"]) for each in records[0] if "probe" in each), None)
    rows = [_row(method, found[method.label], compute_s, goodput, probe) for method in methods]
    return StepTimeResult(rate=rate, goodput_bytes_per_s=goodput, rows=rows, probe=probe)


def _repetitions_of(records: Records, label: str) -> list[list[Mapping[str, Any]]]:
    """Return the records of a method, of all ranks for each repetition."""
    found = [record for by_rank in records for record in by_rank if record.get("method") == label]
    numbers = sorted({record["repetition"] for record in found})
    return [[record for record in found if record["repetition"] == number] for number in numbers]


def _step_times(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [time_s for record in records for time_s in record["step_s"]]


def _row(
    method: MethodSpecification,
    repetitions: Records,
    compute_s: float | None,
    goodput: float | None,
    probe: Measured | None,
) -> Row:
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
        predicted_s=None if probe is None else predicted_s(probe, method),
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
    means = [(row, statistics.fmean(row.whole_s_by_repetition), row.predicted_s) for row in result.rows]
    predicted = [[row.label, _ms(mean_s), _ms(s), f"{s / mean_s:.2f}"] for row, mean_s, s in means if s is not None]
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
        table(["simulated", "measured, ms", "predicted, ms", "predicted / measured"], predicted) if predicted else "",
        "Predicted by a simulation of what was probed before any method ran; measured: the mean." if predicted else "",
    ]


def predicted_s(probe: Measured, method: MethodSpecification, num_steps: int = 1000) -> float | None:
    """Return the time of a step in seconds; None of a method, or of options, that are not simulated. Local."""
    options, cluster = dict(method.options), probe.cluster
    is_as_probed = options.pop("bucket_cap_mb", BUCKET_CAP_MB) == BUCKET_CAP_MB
    if not is_as_probed or not options.keys() <= (_OF_GOSSIP if method.kind == "gossip" else set()):
        return None
    if method.kind in _PLAIN:
        return simulate_time(_PLAIN[method.kind], cluster, probe.workload, num_steps).step_time_s
    compression = options.pop("compression", None)
    if method.kind != "gossip" or (compression is not None and compression not in probe.coding_s):
        return None
    arguments = gossip_arguments(options, cluster.world_size)
    topology, ratio = arguments.pop("topology"), COMPRESSION_RATIOS.get(compression, 1.0)
    run = simulate_time(topology, cluster, probe.workload, num_steps, compression_ratio=ratio, **arguments)
    return run.step_time_s + probe.coding_s.get(compression, 0.0)


def draw_scaled(probe: Measured, methods: Sequence[MethodSpecification], link: str, path: Path) -> None:
    """Draw the predicted steps, relative to computing alone, of more nodes like those probed, and of larger models."""
    from matplotlib.ticker import LogLocator

    num_probed = probe.workload.model_bytes / 4
    with drawn(path, 11, 3.8) as figure:
        for axes, wanted in zip(figure.subplots(1, 1 + len(_LARGER), sharey=True), (0.0, *_LARGER), strict=True):
            num_parameters = max(wanted, num_probed)
            larger = scaled(probe, num_parameters / num_probed)
            alone_s = larger.workload.compute_s
            for number, method in enumerate(each for each in methods if each.kind != "local"):
                on_nodes = (replace(larger, cluster=replace(probe.cluster, num_nodes=nodes)) for nodes in _NODES)
                found = [predicted_s(each, method, _NUM_STEPS) for each in on_nodes]
                if steps := [step_s / alone_s for step_s in found if step_s is not None]:
                    axes.plot(_NODES, steps, marker=".", label=method.label, **look(number))
            axes.set(xscale="log", yscale="log", xlabel="nodes", title=f"{num_parameters / 1e9:.3g} billion parameters")
            axes.set_xticks(_NODES[::2], [f"{nodes:,}" for nodes in _NODES[::2]])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        figure.axes[0].set_ylabel("step, relative to its computation")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
        figure.suptitle(f"Predicted from a probe of {probe.cluster.num_nodes} nodes at {link}", fontsize=10)


def scaled(probe: Measured, factor: float) -> Measured:
    """Return what a model so many times as large would take: all times and buckets are in proportion."""

    def of(workload: Workload) -> Workload:
        spent = {name: factor * getattr(workload, name) for name in ("forward_s", "backward_s", "update_s", "mix_s")}
        return replace(workload, bucket_bytes=tuple(round(factor * each) for each in workload.bucket_bytes), **spent)

    coding_s = {name: factor * seconds for name, seconds in probe.coding_s.items()}
    return replace(probe, workload=of(probe.workload), coding_s=coding_s)

"""The time, bytes and memory of a step of each method (configs/bench.yaml)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Self

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import nn

from gossip.lab.benchmarks.bench_methods import Method, MethodSpecification, sgd
from gossip.lab.benchmarks.benchmark import Benchmark, ComparisonSettings, Links, Place, Record, Records, Write
from gossip.lab.benchmarks.network.counters import PeakMemory, interface_bytes
from gossip.lab.benchmarks.step_time_report import EXPLANATION, StepTimeResult, result_of, section
from gossip.lab.benchmarks.workloads import WORKLOADS, Batch, loss_of
from gossip.lab.experiments.validated_models import OneOf
from gossip.lab.probe.link_probe import measure_links

_MESSAGE_BYTES = 4_000_000  # with which the goodput is measured
_MEAN_DELAY_S = 0.05
STRAGGLERS = {
    "none": "no delays",
    "exponential": "exponentially distributed delays with a mean of 50 ms on every rank and step",
    "one_slow": "rank 0 takes twice the time of its computation",
    "half_speed": "50 ms on every rank and step, but 100 ms on rank 0, as if devices computed meanwhile",
}


class StepTimeSettings(ComparisonSettings):
    """The settings of a benchmark of steps; each link has a table of its own.

    ``model`` is a key of :data:`gossip.lab.benchmarks.workloads.WORKLOADS`, ``straggler`` of
    :data:`STRAGGLERS`. The numbers of steps are those of every method and repetition; the
    seed is that of the initial values, the batches and the delays.
    """

    links: Links = Field(alias="rate")
    model: Annotated[str, OneOf(WORKLOADS)]
    straggler: Annotated[str, OneOf(STRAGGLERS)]
    repetitions: int = Field(ge=1)
    warmup_steps: int = Field(ge=2)
    steps: int = Field(ge=1)
    seed: int = Field(ge=0)

    @model_validator(mode="after")
    def _check_links(self) -> Self:
        if self.network == "loopback" and len(self.links) > 1:
            raise ValueError(f"rate={list(self.links)}: bench.network=loopback has no rate; set bench.network=lab")
        return self


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
        write({"goodput_bytes_per_s": statistics.median(speeds) if speeds else None})
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
        for step in range(case.warmup_steps):
            running.step(self._batch(step))
        # No barrier here: messages in flight would arrive meanwhile, and their bytes and waits would not be counted.
        (_, sent_before), start_s = interface_bytes(place.interface), time.monotonic()
        step_s: list[float] = []
        for step in range(case.steps):
            delay_s = straggler_delay_s(case.straggler, [case.seed, repetition, place.rank, step], self._compute_s)
            step_start_s = time.perf_counter()
            time.sleep(delay_s)
            running.step(self._batch(case.warmup_steps + step))
            step_s.append(time.perf_counter() - step_start_s)
        end_s = time.monotonic()
        sent_bytes = (interface_bytes(place.interface)[1] - sent_before) / place.num_sharing
        peak_bytes = memory.bytes()
        dist.barrier()
        final_loss = self._final_loss(running, module) if repetition == 0 else None
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

    def _batch(self, step: int) -> Batch:
        return self._batches[step % len(self._batches)]

    @torch.no_grad()
    def _final_loss(self, running: Method, module: nn.Module) -> float:
        """Return the loss of the mean of the replicas on the held-out batch. Collective."""
        with running.averaged():
            module.eval()
            return float(loss_of(module, self._workload.held_out(self._case.seed)))

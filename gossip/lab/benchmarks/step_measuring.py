"""Measurement of one method on one rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossip.lab.benchmarks import stragglers
from gossip.lab.benchmarks.bench_methods import METHODS, Method, make_optimizer
from gossip.lab.benchmarks.bench_models import WORKLOADS, Batch, Workload, loss_of
from gossip.lab.benchmarks.bench_specification import MethodSpecification, WorkerSpecification
from gossip.lab.benchmarks.counters import InterfaceBytes, PeakMemory
from gossip.lab.probe import Measured, measure

_NUM_CALIBRATION_STEPS = 10


class Measurement:
    """A measurement of methods one after another, from the same initial values and batches. Collective.

    Parameters
    ----------
    specification : WorkerSpecification
    sign_of_life : callable
        A function that is called after every step.
    """

    def __init__(self, specification: WorkerSpecification, sign_of_life: Callable[[], None]) -> None:
        self._specification = specification
        self._sign_of_life = sign_of_life
        self._workload: Workload = WORKLOADS[specification.model]
        self._batches = self._workload.batches(specification.seed, specification.rank)
        self._compute_s = self._calibrate() if specification.straggler == "one_slow" else 0.0

    def measure(self, method: MethodSpecification, repetition: int) -> dict[str, Any]:
        """Measure the cost of a method on this rank.

        ``start_s`` and ``end_s`` are readings of a clock that all processes of a machine share.
        """
        spec = self._specification
        memory = PeakMemory()
        module = self._workload.initial_module(spec.seed)
        timeout = timedelta(seconds=spec.timeout_s)
        running = METHODS[method.kind](module, self._workload.learning_rate, dict(method.options), timeout)
        dist.barrier()
        for step in range(spec.warmup_steps):
            running.step(self._batch(step))
            self._sign_of_life()
        # No barrier here: messages in flight would arrive meanwhile, and their bytes and waits would not be counted.
        before, start_s = InterfaceBytes.read(spec.interface), time.monotonic()
        step_s: list[float] = []
        waits_s: list[float | None] = []
        for step in range(spec.steps):
            batch, delay_s = self._batch(spec.warmup_steps + step), self._delay_s(repetition, step)
            step_start_s = time.perf_counter()
            if delay_s > 0:
                time.sleep(delay_s)
            running.step(batch)
            step_s.append(time.perf_counter() - step_start_s)
            waits_s.append(running.exposed_wait_s())
            self._sign_of_life()
        end_s = time.monotonic()
        carried = InterfaceBytes.read(spec.interface).since(before)
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
            "exposed_wait_s": waits_s,
            "sent_bytes": carried.sent / spec.num_sharing,
            "received_bytes": carried.received / spec.num_sharing,
            "peak_memory_bytes": peak_bytes,
            "final_loss": final_loss,
        }

    def _batch(self, step: int) -> Batch:
        return self._batches[step % len(self._batches)]

    def _delay_s(self, repetition: int, step: int) -> float:
        spec = self._specification
        return stragglers.delay_s(
            spec.straggler,
            seed=spec.seed,
            repetition=repetition,
            rank=spec.rank,
            step=step,
            compute_s=self._compute_s,
        )

    def _calibrate(self) -> float:
        """Return the median time of a step without communication, while all ranks compute."""
        module = self._workload.initial_module(self._specification.seed)
        local = METHODS["local"](module, self._workload.learning_rate, {}, timedelta(0))
        dist.barrier()
        times_s = []
        for step in range(_NUM_CALIBRATION_STEPS):
            start_s = time.perf_counter()
            local.step(self._batch(step))
            times_s.append(time.perf_counter() - start_s)
        dist.barrier()
        return sorted(times_s)[len(times_s) // 2]

    @torch.no_grad()
    def _final_loss(self, running: Method, module: nn.Module) -> float:
        """Return the loss of the mean of the replicas on the held-out batch. Collective."""
        with running.averaged():
            module.eval()
            return float(loss_of(module, self._workload.held_out(self._specification.seed)))


def probe(spec: WorkerSpecification) -> Measured:
    """Measure what :func:`gossip.simulate_time` needs to know about these ranks. Collective."""
    assert spec.probe_bucket_cap_mb is not None
    workload = WORKLOADS[spec.model]
    module, batches = workload.initial_module(spec.seed), workload.batches(spec.seed, spec.rank)
    return measure(
        module,
        lambda step: loss_of(module, batches[step % len(batches)]),
        partial(make_optimizer, workload.learning_rate),
        bucket_cap_mb=spec.probe_bucket_cap_mb,
    )

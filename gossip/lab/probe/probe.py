"""The command ``gossip probe`` as a benchmark: an MLP's computation, and the links between the ranks."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, TypeAdapter
from torch import nn

from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Records, Write
from gossip.lab.experiments.run_settings import Device, backend_for, own_device
from gossip.lab.probe.cluster_measuring import Measured, measure
from gossip.lab.probe.probe_advice import DataKind, advise
from gossip.launching import DEFAULT_TIMEOUT

NUM_LAYERS = 8


class ProbeSettings(BenchmarkSettings):
    """The settings of a probe."""

    world_size: int = Field(4, ge=1, description="workers on this machine; torchrun and srun say it")
    parameters_mb: PositiveFloat = Field(16.0, description="of the MLP, in 10^6 bytes of float32")
    batch_size: PositiveInt = Field(32, description="per rank")
    steps: int = Field(20, ge=2, description="that are measured")
    bucket_cap_mb: PositiveFloat = Field(25.0, description="of the wrapper, in MiB")
    message_mb: PositiveFloat = Field(8.0, description="of the messages for the bandwidth")
    data: DataKind = Field("alike", description="whether ranks draw from the same data, or each from different ones")
    device: Device = Field("auto", description="cpu or cuda; auto: cuda where torch finds it")


class ProbeResult(BaseModel):
    """What was measured, predicted and chosen, as it is written, and the report."""

    cluster: dict[str, Any]
    workload: dict[str, Any]
    predictions: list[dict[str, Any]]
    choice: dict[str, Any] | None
    advice: str
    report: str = Field(exclude=True)


class Probe(Benchmark[ProbeSettings, ProbeResult]):
    """All ranks measure together; the advice follows."""

    settings = ProbeSettings
    takes_ranks = True

    def launch_options(self, case: ProbeSettings) -> dict[str, Any]:
        """Take nccl where each rank has a GPU, and as many threads as there are cores."""
        backend = backend_for(int(os.environ.get("LOCAL_WORLD_SIZE", case.world_size)), case.device)
        return {"backend": backend, "num_threads": None, "timeout": DEFAULT_TIMEOUT}

    def work(self, case: ProbeSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        device = own_device(case.device)
        torch.manual_seed(0)
        width = max(1, round(math.sqrt(case.parameters_mb * 1e6 / 4 / NUM_LAYERS)))
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        module = nn.Sequential(*layers).to(device)
        inputs = torch.randn(case.batch_size, width, device=device)
        measured = measure(
            module,
            lambda _: module(inputs).square().mean(),
            partial(torch.optim.AdamW, lr=1e-4),
            num_steps=case.steps,
            bucket_cap_mb=case.bucket_cap_mb,
            message_bytes=round(case.message_mb * 1e6),
        )
        write(asdict(measured))

    def result(self, case: ProbeSettings, records: Records) -> ProbeResult:
        measured = TypeAdapter(Measured).validate_python(records[0][0])
        advice = advise(measured, case.data)
        return ProbeResult(
            cluster=asdict(measured.cluster),
            workload=asdict(measured.workload),
            predictions=[
                {"method": row.title, "step_time_s": row.run.step_time_s, "exposed_wait_s": row.run.exposed_wait_s}
                for row in advice.rows
            ],
            choice=None if advice.choice is None else advice.choice.arguments(),
            advice=advice.sentence,
            report=f"{advice}\n",
        )

    def sections(self, results: Sequence[ProbeResult]) -> list[str]:
        return [result.report for result in results]

    def report(self, settings: ProbeSettings, results: Sequence[ProbeResult], machine: str) -> str:  # noqa: ARG002
        return "".join(self.sections(results))

"""A step of all virtual workers, next to the same step by a loop over as many modules."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn
from torch.nn import functional

import topologies
from gossip import VirtualWorkers
from gossip.communication.json_gathering import all_gather_json
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, RowsBenchmark, Write
from gossip.launching import DEFAULT_TIMEOUT
from gossip.virtual.mixing_products import known_rows, weighted_differences
from gossip.virtual.shards import Shard
from topologies import Topology

NUM_TURNS = 3
NUM_WARM_UP = 2  # steps at the beginning of each turn
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class VirtualSpeedSettings(BenchmarkSettings):
    """The settings of a run; a case has one number of workers, and a rank for each way."""

    world_size: int = 2
    workers: tuple[PositiveInt, ...] = Field(
        (16, 64, 256, 1024, 10_000), min_length=1, alias="world_sizes", description="workers of each row"
    )
    topology: str = Field("one_peer_exponential", description="of the workers")
    batch_size: PositiveInt = Field(32, description="samples per worker")
    device: str = Field("cpu", description="of both ways")
    repetitions: PositiveInt = Field(5, description="steps in each turn")
    loop_up_to: int = Field(1024, description="workers; with more, the loop is left out")
    timeout_s: PositiveFloat = 300.0

    def cases(self) -> Iterator[tuple[str, Self]]:
        for number in self.workers:
            ways = 2 if number <= self.loop_up_to else 1
            yield f"{number}_workers", self.model_copy(update={"workers": (number,), "world_size": ways})


class VirtualSpeed(RowsBenchmark[VirtualSpeedSettings]):
    """Rank 0 trains virtual workers and rank 1 the loop, in turns."""

    settings = VirtualSpeedSettings
    title = "A step of virtual workers beside a loop"

    def launch_options(self, case: VirtualSpeedSettings) -> dict[str, Any]:  # noqa: ARG002
        """Take as many threads as one process has, since the ranks take turns."""
        return {"num_threads": torch.get_num_threads()}

    def work(self, case: VirtualSpeedSettings, place: Place, write: Write) -> None:
        """Write the median milliseconds of a step in each way."""
        (number,), device = case.workers, torch.device(case.device)
        if place.rank == 1:
            torch.set_num_threads(1)
        way = (Virtual, Loop)[place.rank](number, topologies.build(case.topology, number), device)
        torch.manual_seed(1)
        inputs = torch.randn(number * case.batch_size, 64, device=device)
        targets = torch.randint(10, (len(inputs),), device=device)
        step_s: list[float] = []
        for turn in range(1 + NUM_TURNS):
            num_steps = NUM_WARM_UP + (case.repetitions if turn > 0 else 0)
            for rank in range(case.world_size):
                dist.barrier()
                for step in range(num_steps if rank == place.rank else 0):
                    start = time.perf_counter()
                    way(inputs, targets)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    if step >= NUM_WARM_UP:
                        step_s.append(time.perf_counter() - start)
            if turn == 0:  # the same training: else there is nothing to compare
                block = way.block.cpu()
                first = block.clone()
                dist.broadcast(first, 0)
                assert torch.allclose(block, first, atol=1e-4), "the two ways have trained apart"
        medians_s = all_gather_json(statistics.median(step_s), "telling how long steps took", DEFAULT_TIMEOUT)
        ways = dict(zip(("virtual, ms", "loop, ms"), (1e3 * median_s for median_s in medians_s), strict=False))
        ratio = {"times as fast": medians_s[1] / medians_s[0]} if case.world_size > 1 else {}
        write({"workers": number, "virtual, ms": "-", "loop, ms": "-", "times as fast": "-"} | ways | ratio)

    def facts(self, settings: VirtualSpeedSettings) -> list[str]:
        threads = f"{torch.get_num_threads()} threads"
        return [f"{settings.topology}, {settings.batch_size} samples per worker, {settings.device}, {threads}."]


def make_module() -> nn.Module:
    """The digits' MLP."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Loop:
    """As many modules and optimizers as workers, in a loop."""

    def __init__(self, world_size: int, topology: Topology, device: torch.device) -> None:
        module = make_module().to(device)
        flat = nn.utils.parameters_to_vector(module.parameters()).detach()
        self.block = flat.repeat(world_size, 1)
        self.modules = [make_module().to(device) for _ in range(world_size)]
        for row, each in zip(self.block, self.modules, strict=True):
            nn.utils.vector_to_parameters(row, each.parameters())
        self.optimizers = [OPTIMIZER(each.parameters()) for each in self.modules]
        self.topology = topology
        self.difference: torch.Tensor | None = None
        self.shard = Shard(range(world_size), device, {}, {})
        self.known_rows = known_rows([self.shard])
        self.step = 0

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        some = zip(inputs.chunk(len(self.modules)), targets.chunk(len(self.modules)), strict=True)
        for module, (own_inputs, own_targets) in zip(self.modules, some, strict=True):
            module.zero_grad()
            functional.cross_entropy(module(own_inputs), own_targets).backward()
        if self.difference is not None:
            self.block += self.difference
        for optimizer in self.optimizers:
            optimizer.step()
        round_ = self.topology.round(self.step)
        (self.difference,) = weighted_differences(round_, [self.shard], [self.block], self.block.dtype, self.known_rows)
        self.step += 1


class Virtual:
    """The same training by virtual workers."""

    def __init__(self, world_size: int, topology: Topology, device: torch.device) -> None:
        self.workers = VirtualWorkers(make_module(), world_size, OPTIMIZER, topology, devices=[device])

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        functional.cross_entropy(self.workers(inputs), targets).backward()

    @property
    def block(self) -> torch.Tensor:
        """The replicas' parameters, [n, numel]."""
        return torch.cat([each.detach().flatten(1) for each in self.workers.parameters()], 1)

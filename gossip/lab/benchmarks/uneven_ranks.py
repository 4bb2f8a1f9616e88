"""One rank that is slower than the others: how fast all of them are, and how good the model is, after equal samples."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat

from gossip import World
from gossip.lab.benchmarks.bench_methods import MethodSpecification, sgd
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, RowsBenchmark, TopologyName, Write
from gossip.lab.benchmarks.summaries import Spread
from gossip.lab.experiments.datasets import digits
from gossip.lab.experiments.evaluation import evaluate_together
from gossip.lab.experiments.models import MLP

_BATCH_SIZE = 16
_LEARNING_RATE = 0.05


class UnevenRanksSettings(BenchmarkSettings):
    """The settings of a run, which all methods have in common."""

    steps: int = Field(100, ge=1, description="of every rank in step")
    compute_ms: float = Field(50.0, ge=0, description="of a step of the others")
    slowness: PositiveFloat = Field(2.0, description="so many times as long on rank 0")
    width: int = Field(512, ge=1, description="of the two hidden layers")
    topology: TopologyName = Field("one_peer_exponential", description="of gossip")
    seeds: int = Field(3, ge=1, description="from 0 on")

    def methods(self) -> list[MethodSpecification]:
        """Return no exchange, all-reduce, gossip in step, and gossip out of step."""
        methods = [MethodSpecification(label=name, kind=name, options={}) for name in ("local", "ddp")]
        for name in ("adapt_while_communicating", "asynchronous"):
            options = {"topology": self.topology, "algorithm": name, "on_peer_loss": "continue"}
            methods.append(MethodSpecification(label=name, kind="gossip", options=options))
        return methods

    def steps_of(self, rank: int, method: str) -> int:
        """Return the steps of a rank: as many as of the others or, out of step, as many as its speed allows."""
        if method != "asynchronous":
            return self.steps
        speeds = [1 / self.slowness, *[1.0] * (self.world_size - 1)]
        return round(self.steps * self.world_size * speeds[rank] / sum(speeds))


class UnevenRanks(RowsBenchmark[UnevenRanksSettings]):
    """Ranks train digits; before each step a rank sleeps, as if a device computed, and rank 0 longer."""

    settings = UnevenRanksSettings
    title = "One rank slower than the others"

    def work(self, case: UnevenRanksSettings, place: Place, write: Write) -> None:
        """Write the speed of all ranks together and the accuracy of each method: medians and means over the seeds."""
        data, world = digits(), World(timedelta(seconds=case.timeout_s))
        compute_s = 1e-3 * case.compute_ms * (case.slowness if place.rank == 0 else 1.0)
        speeds: dict[str, list[float]] = defaultdict(list)
        percents: dict[str, list[float]] = defaultdict(list)
        for seed, method in itertools.product(range(case.seeds), case.methods()):
            torch.manual_seed(seed)
            module = MLP(data.input_shape, data.num_classes, hidden=[case.width] * 2)
            running = method.start(module, sgd(_LEARNING_RATE), case.timeout_s)
            generator = torch.Generator().manual_seed(seed * case.world_size + place.rank)
            num_steps = case.steps_of(place.rank, method.label)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(num_steps):
                chosen = torch.randint(len(data.train_inputs), (_BATCH_SIZE,), generator=generator)
                time.sleep(compute_s)
                running.step((data.train_inputs[chosen], data.train_targets[chosen]))
            steps_per_s = torch.tensor(num_steps / (time.perf_counter() - began), dtype=torch.float64)
            with running.averaged():
                found = evaluate_together(module, data.test_inputs, data.test_targets, world)
            running.close()
            dist.all_reduce(steps_per_s)
            speeds[method.label].append(float(steps_per_s))
            percents[method.label].append(100 * found.accuracy)
        world.close()
        for name, own in percents.items():
            shares = [together / alone for together, alone in zip(speeds[name], speeds["local"], strict=True)]
            points = [percent - ddp for percent, ddp in zip(own, percents["ddp"], strict=True)]
            mean, low, high = statistics.mean(points), min(points), max(points)
            write(
                {
                    "method": name,
                    "steps/s of all ranks": statistics.median(speeds[name]),
                    "relative to no exchange": Spread.over(shares).shown(".3f"),
                    "accuracy, %": statistics.mean(own),
                    "difference from ddp, points": f"{mean:+.2f} ({low:+.2f} to {high:+.2f})",
                }
            )

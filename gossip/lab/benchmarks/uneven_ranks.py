"""One rank that is slower than the others: how fast all of them are, and how good the model is, after equal samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, PositiveFloat

from gossip import World
from gossip.lab.benchmarks.bench_methods import MethodSpecification, sgd
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Records, TopologyName, Write
from gossip.lab.benchmarks.summaries import Spread, table
from gossip.lab.experiments.datasets import digits
from gossip.lab.experiments.evaluation import evaluate_together
from gossip.lab.experiments.models import MLP

_TITLES = ("method", "steps/s of all ranks", "relative to no exchange", "accuracy, %", "difference from ddp, points")
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


class UnevenRanksResult(BaseModel):
    """By method, for each seed: the steps per second of all ranks together, and the accuracy of the averaged model."""

    steps_per_s: dict[str, list[float]]
    accuracy: dict[str, list[float]]


class UnevenRanks(Benchmark[UnevenRanksSettings, UnevenRanksResult]):
    """Ranks train digits; before each step a rank sleeps, as if a device computed, and rank 0 longer."""

    settings = UnevenRanksSettings
    title = "One rank slower than the others"

    def work(self, case: UnevenRanksSettings, place: Place, write: Write) -> None:
        """Write the speed of every method from every seed, and the accuracy."""
        data, timeout = digits(), timedelta(seconds=case.timeout_s)
        world = World(timeout)
        compute_s = 1e-3 * case.compute_ms * (case.slowness if place.rank == 0 else 1.0)
        for seed in range(case.seeds):
            for method in case.methods():
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
                steps_per_s = num_steps / (time.perf_counter() - began)
                with running.averaged():
                    found = evaluate_together(module, data.test_inputs, data.test_targets, world)
                running.close()
                write({"method": method.label, "steps_per_s": steps_per_s, "accuracy": found.accuracy})
        world.close()

    def result(self, case: UnevenRanksSettings, records: Records) -> UnevenRanksResult:  # noqa: ARG002
        found = UnevenRanksResult(steps_per_s={}, accuracy={})
        for of_ranks in zip(*records, strict=True):
            speed, name = sum(record["steps_per_s"] for record in of_ranks), of_ranks[0]["method"]
            found.steps_per_s.setdefault(name, []).append(speed)
            found.accuracy.setdefault(name, []).append(of_ranks[0]["accuracy"])
        return found

    def sections(self, results: Sequence[UnevenRanksResult]) -> list[str]:
        """Return a table of the methods: speeds are medians over the seeds, accuracies means."""
        return [table(_TITLES, (_cells(name, result) for name in result.accuracy)) for result in results]


def _cells(name: str, result: UnevenRanksResult) -> list[str]:
    speeds, accuracies = result.steps_per_s[name], result.accuracy[name]
    shares = [own / alone for own, alone in zip(speeds, result.steps_per_s["local"], strict=True)]
    differences = [100 * (own - ddp) for own, ddp in zip(accuracies, result.accuracy["ddp"], strict=True)]
    return [
        name,
        f"{statistics.median(speeds):.1f}",
        Spread.over(shares).shown(".3f"),
        f"{100 * statistics.mean(accuracies):.2f}",
        f"{statistics.mean(differences):+.2f} ({min(differences):+.2f} to {max(differences):+.2f})",
    ]

"""One rank of a run: ``python -m gossip.lab.time_to_loss.loss_worker SPECIFICATION.json``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from gossip import World
from gossip.communication.json_gathering import all_gather_json
from gossip.lab.benchmarks.bench_methods import METHODS, Method, make_optimizer
from gossip.lab.benchmarks.bench_models import loss_of
from gossip.lab.benchmarks.bench_specification import MethodSpecification
from gossip.lab.benchmarks.bench_worker import attend
from gossip.lab.experiments.evaluation import evaluate_together
from gossip.lab.experiments.records import JsonlWriter
from gossip.lab.probe import Measured, advise, measure
from gossip.lab.time_to_loss.loss_curves import Curve, Point, reaches_or_ends, target_of
from gossip.lab.time_to_loss.loss_specification import LossSpecification
from gossip.lab.time_to_loss.loss_tasks import TASKS
from gossip.lab.time_to_loss.training_clock import TrainingClock


class LossMeasurement:
    """A training with methods one after another, from the same initial values and batches. Collective.

    Parameters
    ----------
    spec : LossSpecification
    sign_of_life : callable
        A function that is called after every step.
    """

    def __init__(self, spec: LossSpecification, sign_of_life: Callable[[], None]) -> None:
        self._spec, self._sign_of_life = spec, sign_of_life
        self._task = TASKS[spec.task]
        self._data = self._task.make_data()
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._world = World(self._timeout)

    def probe(self) -> Measured:
        """Measure what :func:`gossip.simulate_time` needs to know about these ranks; equal on every rank."""
        spec = self._spec
        module = self._task.initial_module(self._data, spec.seeds[0])
        batches = self._task.batches(self._data, spec.world_size, spec.seeds[0], range(spec.rank, spec.rank + 1))
        optimizer = partial(make_optimizer, self._task.learning_rate)
        return measure(module, lambda _: loss_of(module, next(batches)), optimizer)

    def as_probed(self, measured: Measured) -> tuple[MethodSpecification, str]:
        """Return gossip as the probe on rank 0 chooses it, and the reason."""
        made = None
        if self._spec.rank == 0:
            advice = advise(measured, "different")
            assert advice.choice is not None, "complete serves all ranks, and agrees at once"
            made = advice.choice.arguments(), advice.sentence
        options, sentence = all_gather_json(made, "telling what the probe chooses", self._timeout)[0]
        return MethodSpecification("gossip as probed", "gossip", options), sentence

    def measure(self, method: MethodSpecification, seed: int, is_done: Callable[[Point], bool]) -> Curve:
        """Train until ``is_done`` holds for an evaluation; the points are the same on every rank."""
        spec = self._spec
        module = self._task.initial_module(self._data, seed)
        batches = self._task.batches(self._data, spec.world_size, seed, range(spec.rank, spec.rank + 1))
        running: Method = METHODS[method.kind](module, self._task.learning_rate, dict(method.options), self._timeout)
        clock = TrainingClock(spec.interface, spec.num_sharing, spec.quiet_s, spec.timeout_s)
        points: list[Point] = []
        while not points or not (is_done(points[-1]) or math.isnan(points[-1].loss)):
            clock.start()
            for _ in range(spec.evaluate_every):
                running.step(next(batches))
                self._sign_of_life()
            clock.stop()
            with running.averaged():
                of_mean = evaluate_together(module, self._data.test_inputs, self._data.test_targets, self._world)
            points.append(Point((len(points) + 1) * spec.evaluate_every, clock.seconds, clock.sent_bytes, of_mean.loss))
            self._sign_of_life()
        dist.barrier()
        running.close()
        return Curve(method.label, seed, points)

    def close(self) -> None:
        """End the communication of the evaluations."""
        self._world.close()


def run(spec: LossSpecification) -> None:
    """Probe, then train with every method from every seed, and write a record of each training. Collective."""
    reference, *others = spec.methods
    with JsonlWriter(spec.records) as writer:
        measurement = LossMeasurement(spec, sign_of_life=lambda: os.utime(spec.records))
        measured = measurement.probe()
        chosen, advice = measurement.as_probed(measured) if spec.as_probed else (None, "")
        writer.write({"probe": asdict(measured), "chosen": chosen and asdict(chosen), "advice": advice})
        for seed in spec.seeds:
            curve = measurement.measure(reference, seed, lambda point: point.step >= spec.steps)
            writer.write(curve.to_dict())
            limit_s = spec.max_time_ratio * curve.points[-1].seconds
            is_done = reaches_or_ends(target_of(curve.points), limit_s)
            for method in (*others, *filter(None, [chosen])):
                writer.write(measurement.measure(method, seed, is_done).to_dict())
        measurement.close()


if __name__ == "__main__":
    attend(LossSpecification, run)

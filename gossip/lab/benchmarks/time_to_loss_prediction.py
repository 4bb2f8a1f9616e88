"""The same training by virtual workers, and the predicted time of its steps on a described network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import nn

from gossip import Cluster, VirtualWorkers, Workload, simulate_time
from gossip.lab.benchmarks.bench_methods import MethodSpecification, gossip_arguments, make_optimizer
from gossip.lab.benchmarks.time_to_loss_report import Curve, Point, target_of
from gossip.lab.benchmarks.workloads import LOSS_TASKS
from gossip.lab.experiments.evaluation import cross_entropy, evaluate
from gossip.lab.experiments.wrapper_options import options_of_virtual_workers

_NUM_STEPS = 200  # simulated steps
_MOST_STEPS_FACTOR = 4  # virtual workers make at most this many times all-reduce's steps
_TINY = 64  # parameters of the model with which messages are counted
_DDP_RATIOS = {None: 1.0, "bf16": 2.0, "fp16": 2.0}
_TOPOLOGIES_OF_DECENT_DP = {"complete": "complete", "ring": "ring", "one-peer-exp": "one_peer_exponential"}


@dataclass(frozen=True)
class VirtualTraining:
    """A training by virtual workers with the same steps as the ranks make.

    Attributes
    ----------
    task : str
        A key of :data:`gossip.lab.benchmarks.workloads.LOSS_TASKS`.
    world_size, evaluate_every : int
    """

    task: str
    world_size: int
    evaluate_every: int

    def train(self, method: MethodSpecification, seed: int, is_done: Callable[[Point], bool]) -> Curve:
        """Train until ``is_done`` holds for an evaluation; the seconds of the points are NaN."""
        logger.info("{}: {} by virtual workers", self.task, method.label)
        task = LOSS_TASKS[self.task]
        data = task.make_data()
        workers = self._workers(method, seed)
        batches = task.batches(data, self.world_size, seed, range(self.world_size))
        points: list[Point] = []
        sent_bytes = 0.0
        while not points or not (is_done(points[-1]) or math.isnan(points[-1].loss)):
            for inputs, targets in itertools.islice(batches, self.evaluate_every):
                cross_entropy(workers(inputs), targets).backward()
                stats = workers.stats()
                assert stats is not None
                sent_bytes += stats.bytes_sent
            with workers.averaged() as module:
                of_mean = evaluate(module, data.test_inputs, data.test_targets)
            step = (len(points) + 1) * self.evaluate_every
            points.append(Point(step=step, seconds=math.nan, sent_bytes=sent_bytes, loss=of_mean.loss))
        return Curve(method=method.label, seed=seed, points=points)

    def step_time_s(self, method: MethodSpecification, end: Point, cluster: Cluster, workload: Workload) -> float:
        """Return the mean step time that :func:`gossip.simulate_time` predicts for messages as large as in training.

        Parameters
        ----------
        method : MethodSpecification
        end : Point
            The last evaluation of the method's virtual training.
        cluster, workload
            The cluster and the workload, as probed.
        """
        if method.kind == "local":
            return simulate_time("none", cluster, workload, _NUM_STEPS).step_time_s
        if method.kind == "ddp":
            ratio = _DDP_RATIOS[method.options.get("hook")]
            return simulate_time("ddp", cluster, workload, _NUM_STEPS, compression_ratio=ratio).step_time_s
        arguments = gossip_arguments(_options_of(method), self.world_size)
        return simulate_time(
            arguments["topology"],
            cluster,
            workload,
            _NUM_STEPS,
            algorithm=arguments.get("algorithm", "adapt_while_communicating"),
            compression_ratio=self._compression_ratio(method, end),
        ).step_time_s

    def _compression_ratio(self, method: MethodSpecification, end: Point) -> float:
        if not end.sent_bytes:  # before the first exchange
            return 1.0
        task = LOSS_TASKS[self.task]
        model_bytes = sum(each.nbytes for each in task.initial_module(task.make_data(), 0).parameters())
        return self._num_messages(method, end.step) * model_bytes / end.sent_bytes

    def _num_messages(self, method: MethodSpecification, num_steps: int) -> float:
        """Return the number of messages of the model's size that a rank sends without compression."""
        module, num_bytes = nn.Linear(_TINY, 1, bias=False), 0.0
        options = {name: value for name, value in _options_of(method).items() if name != "compression"}
        workers = VirtualWorkers(module, self.world_size, partial(make_optimizer, 0.0), **self._arguments(options))
        for _ in range(num_steps):
            workers(torch.ones(self.world_size, _TINY)).mean().backward()
            stats = workers.stats()
            assert stats is not None
            num_bytes += stats.bytes_sent
        return num_bytes / module.weight.nbytes

    def _workers(self, method: MethodSpecification, seed: int) -> VirtualWorkers:
        task = LOSS_TASKS[self.task]
        module = task.initial_module(task.make_data(), seed)
        optimizer = partial(make_optimizer, task.learning_rate)
        return VirtualWorkers(module, self.world_size, optimizer, **self._arguments(_options_of(method)))

    def _arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"devices": ["cpu"], **options_of_virtual_workers(gossip_arguments(options, self.world_size))}


class VirtualRuns:
    """Virtual trainings that find where each method reaches virtual all-reduce's target; each method trains once.

    Parameters
    ----------
    training : VirtualTraining
    reference : MethodSpecification
        All-reduce.
    seed, steps : int
        The seed, and the number of steps that all-reduce makes.
    """

    def __init__(self, training: VirtualTraining, reference: MethodSpecification, seed: int, steps: int) -> None:
        self._training, self._seed, self._most_steps = training, seed, _MOST_STEPS_FACTOR * steps
        curve = training.train(reference, seed, lambda point: point.step >= steps)
        self._target = target_of(curve.points)
        self._reached = {str(reference): curve.reached(self._target)}

    def predicted_s(
        self, methods: Sequence[MethodSpecification], cluster: Cluster, workload: Workload
    ) -> dict[str, float]:
        """Return the predicted time to the target by label, without the methods that did not reach it."""
        ends = {method.label: (method, self._end(method)) for method in methods}
        return {
            label: end.step * self._training.step_time_s(method, end, cluster, workload)
            for label, (method, end) in ends.items()
            if end is not None
        }

    def _end(self, method: MethodSpecification) -> Point | None:
        if str(method) not in self._reached:
            curve = self._training.train(
                method, self._seed, lambda point: point.loss <= self._target or point.step >= self._most_steps
            )
            self._reached[str(method)] = curve.reached(self._target)
        return self._reached[str(method)]


def _options_of(method: MethodSpecification) -> Mapping[str, Any]:
    """Return the options with which gossip makes the same steps as a method.

    The replicas of all-reduce equal the mean of replicas that are averaged exactly after every step, because SGD with
    momentum is linear in the gradients. Decent-DP adapts while communicating, as gossip does by default.
    """
    if method.kind == "gossip":
        return method.options
    if method.kind == "ddp":
        return {"topology": "complete", "algorithm": "adapt_then_combine"}
    if method.kind == "decent_dp":
        return {"topology": _TOPOLOGIES_OF_DECENT_DP[method.options.get("topology", "complete")]}
    return {"topology": {"name": "ring", "every": 2**31}}

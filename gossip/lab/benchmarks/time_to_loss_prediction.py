"""The same training by virtual workers, and the predicted time of its steps on a described network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from loguru import logger

from gossip import Cluster, VirtualWorkers, Workload, simulate_time
from gossip.lab.benchmarks.bench_methods import MethodSpecification, gossip_arguments, make_optimizer
from gossip.lab.benchmarks.time_to_loss_report import Curve, Point, target_of
from gossip.lab.benchmarks.workloads import LOSS_TASKS
from gossip.lab.experiments.evaluation import cross_entropy, evaluate
from gossip.lab.experiments.wrapper_options import options_of_virtual_workers

_NUM_STEPS = 200  # simulated steps
_MOST_STEPS_FACTOR = 4  # virtual workers make at most this many times all-reduce's steps
_DDP_RATIOS = {None: 1.0, "bf16": 2.0, "fp16": 2.0}
_TOPOLOGIES_OF_DECENT_DP = {"complete": "complete", "ring": "ring", "one-peer-exp": "one_peer_exponential"}


@dataclass(frozen=True)
class VirtualTraining:
    """Trainings by virtual workers with the same steps as the ranks make; each method trains once.

    Attributes
    ----------
    task : str
        A key of :data:`gossip.lab.benchmarks.workloads.LOSS_TASKS`.
    world_size, evaluate_every, seed : int
    """

    task: str
    world_size: int
    evaluate_every: int
    seed: int
    _curves: dict[str, Curve] = field(default_factory=dict)

    def predicted_s(
        self, methods: Sequence[MethodSpecification], steps: int, cluster: Cluster, workload: Workload
    ) -> dict[str, float]:
        """Return the predicted time by label in which each method reaches the target, without those that do not.

        The first method is all-reduce, whose ``steps`` steps set the target; the cluster and the workload are as
        probed.
        """
        target = target_of(self.train(methods[0], lambda point: point.step >= steps).points)

        def ends(point: Point) -> bool:
            return point.loss <= target or point.step >= _MOST_STEPS_FACTOR * steps

        reached = {method.label: (method, self.train(method, ends).reached(target)) for method in methods}
        return {
            label: end.step * self.step_time_s(method, cluster, workload)
            for label, (method, end) in reached.items()
            if end is not None
        }

    def train(self, method: MethodSpecification, is_done: Callable[[Point], bool]) -> Curve:
        """Train until ``is_done`` holds for an evaluation, unless that was done; the seconds of the points are NaN."""
        if str(method) in self._curves:
            return self._curves[str(method)]
        logger.info("{}: {} by virtual workers", self.task, method.label)
        task = LOSS_TASKS[self.task]
        data = task.make_data()
        arguments = options_of_virtual_workers(gossip_arguments(_options_of(method), self.world_size))
        optimizer = partial(make_optimizer, task.learning_rate)
        module = task.initial_module(data, self.seed)
        workers = VirtualWorkers(module, self.world_size, optimizer, devices=["cpu"], **arguments)
        batches = task.batches(data, self.world_size, self.seed, range(self.world_size))
        points: list[Point] = []
        sent_bytes = 0.0
        while not points or not (is_done(points[-1]) or math.isnan(points[-1].loss)):
            for inputs, targets in itertools.islice(batches, self.evaluate_every):
                cross_entropy(workers(inputs), targets).backward()
                stats = workers.stats()
                assert stats is not None
                sent_bytes += stats.bytes_sent
            with workers.averaged() as average:
                loss = evaluate(average, data.test_inputs, data.test_targets).loss
            step = (len(points) + 1) * self.evaluate_every
            points.append(Point(step=step, seconds=math.nan, sent_bytes=sent_bytes, loss=loss))
        return self._curves.setdefault(str(method), Curve(method=method.label, seed=self.seed, points=points))

    def step_time_s(self, method: MethodSpecification, cluster: Cluster, workload: Workload) -> float:
        """Return the mean step time that :func:`gossip.simulate_time` predicts for a method that has trained."""
        simulated: Any = {"local": "none"}.get(method.kind, method.kind)
        options: dict[str, Any] = {}
        if method.kind == "ddp":
            options["compression_ratio"] = _DDP_RATIOS[method.options.get("hook")]
        elif method.kind != "local":
            arguments = gossip_arguments(_options_of(method), self.world_size)
            simulated, options["compression_ratio"] = arguments["topology"], self._compression_ratio(method)
            if "algorithm" in arguments:
                options["algorithm"] = arguments["algorithm"]
        return simulate_time(simulated, cluster, workload, _NUM_STEPS, **options).step_time_s

    def _compression_ratio(self, method: MethodSpecification) -> float:
        """Return by how much less a method has sent than without compression, up to the first exchange."""
        if method.options.get("compression") is None:
            return 1.0
        curve = self._curves[str(method)]
        options = {name: value for name, value in method.options.items() if name != "compression"}
        plain = method.model_copy(update={"label": f"{method.label}, uncompressed", "options": options})
        last = curve.points[-1].step
        sent = self.train(plain, lambda point: point.sent_bytes > 0 or point.step >= last).points
        compressed_bytes = curve.points[len(sent) - 1].sent_bytes
        return sent[-1].sent_bytes / compressed_bytes if compressed_bytes else 1.0


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

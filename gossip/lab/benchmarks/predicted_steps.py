"""Measured step times beside predictions by :func:`gossip.simulate_time` from a probe of the same ranks.

The parameters of a prediction are measured before any method runs, from steps without communication, from messages
between pairs, and from both at once (:mod:`gossip.lab.probe`); nothing is fitted to the step times to be predicted.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, TypeAdapter

import topologies
from gossip import Cluster, RandomDelays, SlowRank, Workload, simulate_time
from gossip.lab.benchmarks import stragglers
from gossip.lab.benchmarks.bench_methods import make_optimizer
from gossip.lab.benchmarks.benchmark import Benchmark, Place, Record
from gossip.lab.benchmarks.step_time import Measurement, StepTimeSettings
from gossip.lab.benchmarks.summaries import table
from gossip.lab.benchmarks.workloads import WORKLOADS, loss_of
from gossip.lab.experiments.validated_models import read
from gossip.lab.probe import Measured, measure

_NUM_STEPS = 1000  # simulated; many, so that the prediction is free of the random variation of the measured steps
_ONE_SLOW_FACTOR = 2.0


SIMULATED: Mapping[str, tuple[RandomDelays | SlowRank, ...]] = {
    "none": (),
    "exponential": (RandomDelays(stragglers.MEAN_S),),
    "one_slow": (SlowRank(stragglers.SLOW_RANK, _ONE_SLOW_FACTOR),),
}
"""The kinds of stragglers that can be simulated, as arguments of :func:`gossip.simulate_time`."""


class PredictedStepsSettings(StepTimeSettings):
    """The settings of a run; a case has a single kind of straggler.

    Attributes
    ----------
    stragglers : tuple of str
        Keys of :data:`SIMULATED`.
    bucket_cap_mb : float
        The bucket size of every method, in MiB.
    """

    stragglers: tuple[str, ...]
    bucket_cap_mb: float

    @classmethod
    def of(
        cls,
        methods: Sequence[str],
        rates: Sequence[str],
        stragglers: Sequence[str],
        *,
        network: str,
        world_size: int,
        num_steps: int,
        bucket_cap_mb: float,
    ) -> Self:
        """Return the settings for methods given as "local", "ddp", or names of topologies."""
        rows: dict[str, Any] = {name: {"bucket_cap_mb": bucket_cap_mb} for name in methods if name != "local"}
        for name in rows.keys() - {"ddp"}:
            rows[name] |= {"method": "gossip", "topology": name}
        return read(
            cls,
            {
                "world_size": world_size,
                "network": network,
                "rate": list(rates),
                "methods": {name: rows.get(name, {}) for name in methods},
                "model": "mlp",
                "straggler": stragglers[0],
                "repetitions": 1,
                "warmup_steps": 3,
                "steps": num_steps,
                "seed": 0,
                "stragglers": list(stragglers),
                "bucket_cap_mb": bucket_cap_mb,
            },
        )

    def cases(self) -> Iterator[tuple[str, Self]]:
        """Yield every kind of straggler on every link."""
        for straggler in self.stragglers:
            for name, case in super().cases():
                yield f"{straggler}_{name}", case.model_copy(update={"straggler": straggler})


class Case(BaseModel):
    """Measured and predicted steps with one network and one kind of straggler.

    Attributes
    ----------
    rate : str
        The rate of every link in each direction, in the notation of tc.
    straggler : str
        A key of :data:`SIMULATED`.
    cluster, workload
        The cluster and the workload as probed, without the stragglers of the benchmark.
    step_s : mapping of str to float
        The measured mean step time by method: "local", "ddp", or the name of a topology.
    """

    rate: str
    straggler: str
    cluster: Cluster
    workload: Workload
    step_s: dict[str, float]

    def predict(self, method: str) -> float:
        """Return the predicted mean step time of a method, in seconds."""
        workload = dataclasses.replace(self.workload, stragglers=SIMULATED[self.straggler])
        simulated = {"local": "none", "ddp": "ddp"}.get(method) or topologies.build(method, self.cluster.world_size)
        return simulate_time(simulated, self.cluster, workload, _NUM_STEPS).step_time_s


class PredictedSteps(Benchmark[PredictedStepsSettings, Case]):
    """Ranks are probed, and then all methods are measured in the same processes."""

    settings = PredictedStepsSettings
    title = "Measured and predicted steps"
    explanation = ""

    def work(self, case: PredictedStepsSettings, place: Place) -> Iterator[Record]:
        """Yield what the probe measured, and then a record of every method."""
        yield {"probe": dataclasses.asdict(self._probe(case, place))}
        measurement = Measurement(case, place)
        for method in case.methods:
            yield measurement.measure(method, 0)

    def _probe(self, case: PredictedStepsSettings, place: Place) -> Measured:
        """Measure what :func:`gossip.simulate_time` needs to know about these ranks. Collective."""
        workload = WORKLOADS[case.model]
        module, batches = workload.initial_module(case.seed), workload.batches(case.seed, place.rank)
        return measure(
            module,
            lambda step: loss_of(module, batches[step % len(batches)]),
            partial(make_optimizer, workload.learning_rate),
            bucket_cap_mb=case.bucket_cap_mb,
        )

    def result(self, case: PredictedStepsSettings, records: Sequence[Sequence[Mapping[str, Any]]]) -> Case:
        """Return the mean step time of each method over the ranks, and what was probed."""
        probe = TypeAdapter(Measured).validate_python(records[0][0]["probe"])
        step_s = {
            method.label: statistics.fmean(
                (record["end_s"] - record["start_s"]) / case.steps
                for by_rank in records
                for record in by_rank
                if record.get("method") == method.label
            )
            for method in case.methods
        }
        workload = dataclasses.replace(probe.workload, stragglers=())
        rate = case.link or case.network
        return Case(rate=rate, straggler=case.straggler, cluster=probe.cluster, workload=workload, step_s=step_s)

    def sections(self, results: Sequence[Case]) -> list[str]:
        """Return a table of measured and predicted milliseconds per step, and their ratio."""
        rows = []
        for case in results:
            for method, step_s in case.step_s.items():
                predicted_s = case.predict(method)
                numbers = f"{1e3 * step_s:.1f}", f"{1e3 * predicted_s:.1f}", f"{predicted_s / step_s:.2f}"
                rows.append([case.rate, case.straggler, method, *numbers])
        return [table(["rate", "stragglers", "method", "measured, ms", "predicted, ms", "predicted / measured"], rows)]

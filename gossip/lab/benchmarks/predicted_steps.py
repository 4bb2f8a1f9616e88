"""Measured step times beside predictions by :func:`gossip.simulate_time` from a probe of the same ranks.

The parameters of a prediction are measured before any method runs, from steps without communication, from messages
between pairs, and from both at once (:mod:`gossip.lab.probe`); nothing is fitted to the step times to be predicted.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationInfo, field_validator

import topologies
from gossip import Cluster, DiLoCo, RandomDelays, SlowRank, Workload, simulate_time
from gossip.lab.benchmarks import stragglers
from gossip.lab.benchmarks.bench_methods import MethodSpecification, expand, sgd
from gossip.lab.benchmarks.benchmark import Benchmark, Links, Place, Records, Write
from gossip.lab.benchmarks.step_time import Measurement, StepTimeSettings
from gossip.lab.benchmarks.summaries import look, set_logarithmic, table
from gossip.lab.benchmarks.workloads import WORKLOADS, loss_of
from gossip.lab.experiments.validated_models import OneOf
from gossip.lab.probe import Measured, measure

_NUM_STEPS = 1000  # simulated; many, so that the prediction is free of the random variation of the measured steps
_BUCKET_CAP_MB = 5.0  # of every method
_INT8_RATIO = 4 * 4096 / (4096 + 6)  # a code for each value, and six bytes for a block of 4,096
SIMULATED: Mapping[str, tuple[RandomDelays | SlowRank, ...]] = {
    "none": (),
    "exponential": (RandomDelays(stragglers.MEAN_S),),
    "one_slow": (SlowRank(stragglers.SLOW_RANK, 2.0),),
}
"""The kinds of stragglers that can be simulated, as arguments of :func:`gossip.simulate_time`."""


class PredictedStepsSettings(StepTimeSettings):
    """The settings of a run; a case has a single kind of straggler."""

    network: Literal["loopback", "lab"] = "lab"
    links: Links = Field(("1000mbit", "200mbit", "100mbit"), alias="rates", description="of every link, each way")
    stragglers: tuple[Annotated[str, OneOf(SIMULATED)], ...] = Field(
        tuple(SIMULATED), min_length=1, description=", ".join(SIMULATED)
    )
    methods: tuple[MethodSpecification, ...] = Field(
        ("local", "ddp", "one_peer_exponential", "ring", "complete"),
        description="local, ddp, and names of topologies",
        validate_default=True,
    )
    model: Annotated[str, OneOf(WORKLOADS)] = Field("mlp", description=", ".join(WORKLOADS))
    straggler: str = "none"
    repetitions: int = 1
    warmup_steps: int = 3
    scale: bool = Field(False, description="draw what is predicted for 8 to 1,024 nodes and larger models, too")
    steps: int = Field(20, ge=1, description="that are measured, of each method")
    seed: int = 0

    @field_validator("methods", mode="before")
    @classmethod
    def _expand(cls, given: Any, info: ValidationInfo) -> Any:
        rows: dict[str, Any] = {"local": {}, "ddp": {"bucket_cap_mb": _BUCKET_CAP_MB}}
        of_gossip = {"method": "gossip", "bucket_cap_mb": _BUCKET_CAP_MB}
        named = {name: rows.get(name, {**of_gossip, "topology": name}) for name in given}
        return expand(named, info.data.get("world_size", 1))

    def cases(self) -> Iterator[tuple[str, Self]]:
        for straggler in self.stragglers:
            for name, case in super().cases():
                yield f"{straggler}_{name}", case.model_copy(update={"straggler": straggler})


class Case(BaseModel):
    """Measured and predicted steps with one rate of every link and one kind of straggler, a key of :data:`SIMULATED`.

    Cluster and workload are as probed, without the stragglers; ``step_s`` has the measured mean step time by method:
    "local", "ddp", or the name of a topology.
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

    def work(self, case: PredictedStepsSettings, place: Place, write: Write) -> None:
        """Write what the probe measured, and then a record of every method."""
        workload = WORKLOADS[case.model]
        module, batches = workload.initial_module(case.seed), workload.batches(case.seed, place.rank)
        probed = measure(
            module,
            lambda step: loss_of(module, batches[step % len(batches)]),
            sgd(workload.learning_rate),
            bucket_cap_mb=_BUCKET_CAP_MB,
        )
        write({"probe": dataclasses.asdict(probed)})
        measurement = Measurement(case, place)
        for method in case.methods:
            write(measurement.measure(method, 0))

    def result(self, case: PredictedStepsSettings, records: Records) -> Case:
        """Return the mean step time of each method over the ranks, and what was probed."""
        probe = TypeAdapter(Measured).validate_python(records[0][0]["probe"])
        step_s = {
            measured[0]["method"]: statistics.fmean(
                (record["end_s"] - record["start_s"]) / case.steps for record in measured
            )
            for measured in zip(*(by_rank[1:] for by_rank in records), strict=True)
        }
        workload = dataclasses.replace(probe.workload, stragglers=())
        rate = case.link or case.network
        return Case(rate=rate, straggler=case.straggler, cluster=probe.cluster, workload=workload, step_s=step_s)

    def sections(self, results: Sequence[Case]) -> list[str]:
        rows = []
        for case in results:
            for method, step_s in case.step_s.items():
                predicted_s = case.predict(method)
                numbers = f"{1e3 * step_s:.1f}", f"{1e3 * predicted_s:.1f}", f"{predicted_s / step_s:.2f}"
                rows.append([case.rate, case.straggler, method, *numbers])
        return [table(["rate", "stragglers", "method", "measured, ms", "predicted, ms", "predicted / measured"], rows)]

    def draw(self, settings: PredictedStepsSettings, results: Sequence[Case], folder: Path) -> None:
        """Draw the figure of more nodes and larger models, from what was probed on the first link."""
        if settings.scale:
            scale_figure(results[0], folder / "scale.svg")


_NODES = (8, 16, 32, 64, 128, 256, 512, 1024)
_NUM_PARAMETERS = (0, 1.3e9, 7e9)  # at least those that were measured
_NUM_SCALED_STEPS = 8


def scale_figure(case: Case, path: Path) -> None:
    """Draw the predicted time of a step, relative to one without exchange, on nodes and links like those probed.

    All times and buckets of a larger model are so many times those of the measured one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    of_measured = case.workload.model_bytes / 4
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "ddp": ("ddp", {}),
        "one_peer_exponential": ("one_peer_exponential", {}),
        "one_peer_exponential, int8": ("one_peer_exponential", {"compression_ratio": _INT8_RATIO}),
        "diloco, every 50 steps": ("complete", {"algorithm": DiLoCo()}),
    }
    for axes, wanted in zip(figure.subplots(1, 3, sharey=True), _NUM_PARAMETERS, strict=True):
        num_parameters = max(wanted, of_measured)
        workload = scaled(case.workload, num_parameters / of_measured)
        for number, (label, (name, options)) in enumerate(methods.items()):
            steps = 2 * 50 + 1 if "algorithm" in options else _NUM_SCALED_STEPS  # two outer steps have been awaited
            found = []
            for num_nodes in _NODES:
                cluster = dataclasses.replace(case.cluster, num_nodes=num_nodes)
                method = name if name == "ddp" else topologies.build(name, cluster.world_size)
                alone_s = simulate_time("none", cluster, workload, steps).step_time_s
                found.append(simulate_time(method, cluster, workload, steps, **options).step_time_s / alone_s)
            axes.plot(_NODES, found, marker=".", label=label, **look(number))
        title = f"{num_parameters / 1e9:.3g} billion parameters"
        axes.set(xscale="log", yscale="log", xlabel="nodes", title=title)
        axes.set_xticks(_NODES[::2], [f"{each:,}" for each in _NODES[::2]])
        axes.minorticks_off()
        set_logarithmic(axes.yaxis)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("step, relative to one without exchange")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Predicted from a probe of {case.cluster.num_nodes} nodes at {case.rate}")
    figure.savefig(path, metadata={"Date": None})


def scaled(workload: Workload, factor: float) -> Workload:
    """Return the workload of a model that is so many times as large, in as many buckets."""
    spent = {name: factor * getattr(workload, name) for name in ("forward_s", "backward_s", "update_s", "mix_s")}
    num_bytes = tuple(round(factor * of_bucket) for of_bucket in workload.bucket_bytes)
    return dataclasses.replace(workload, bucket_bytes=num_bytes, **spent)

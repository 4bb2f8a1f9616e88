"""Measured step times beside predictions by :func:`gossip.simulate_time` from a probe of the same ranks.

The parameters of a prediction are measured before any method runs, from steps without communication, from messages
between pairs, and from both at once (:mod:`gossip.lab.probe`); nothing is fitted to the step times to be predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import topologies
from gossip import Cluster, RandomDelays, SlowRank, Workload, simulate_time
from gossip.lab.benchmarks import bench_workers, stragglers
from gossip.lab.benchmarks.bench_settings import Settings, expand
from gossip.lab.benchmarks.networks import Network

_NUM_STEPS = 1000  # simulated; many, so that the prediction is free of the random variation of the measured steps
_ONE_SLOW_FACTOR = 2.0


SIMULATED: Mapping[str, tuple[RandomDelays | SlowRank, ...]] = {
    "none": (),
    "exponential": (RandomDelays(stragglers.MEAN_S),),
    "one_slow": (SlowRank(stragglers.SLOW_RANK, _ONE_SLOW_FACTOR),),
}
"""The kinds of stragglers that can be simulated, as arguments of :func:`gossip.simulate_time`."""


@dataclass(frozen=True)
class Case:
    """Measured and predicted steps with one network and one kind of straggler.

    Attributes
    ----------
    rate : str
        The rate of every link in each direction, in the notation of tc.
    straggler : str
        A key of :data:`SIMULATED`.
    cluster, workload : mapping
        Keyword arguments of the classes of these names, as probed, without the stragglers of the benchmark.
    step_s : mapping of str to float
        The measured mean step time by method: "local", "ddp", or the name of a topology.
    """

    rate: str
    straggler: str
    cluster: Mapping[str, Any]
    workload: Mapping[str, Any]
    step_s: Mapping[str, float]

    def predict(self, method: str) -> float:
        """Return the predicted mean step time of a method, in seconds."""
        cluster = Cluster(**self.cluster)
        if self.straggler not in SIMULATED:
            raise ValueError(
                f"straggler must be one of {', '.join(SIMULATED)}, which are simulated, got {self.straggler!r}"
            )
        arguments = {**self.workload, "bucket_bytes": tuple(self.workload["bucket_bytes"])}
        workload = Workload(**arguments, stragglers=SIMULATED[self.straggler])
        simulated = {"local": "none", "ddp": "ddp"}.get(method) or topologies.build(method, cluster.world_size)
        return simulate_time(simulated, cluster, workload, _NUM_STEPS).step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain JSON types."""
        return asdict(self)


def measure_case(
    network: Network,
    rate: str,
    straggler: str,
    methods: Sequence[str],
    *,
    world_size: int,
    num_steps: int,
    bucket_cap_mb: float,
    folder: Path,
) -> Case:
    """Probe the ranks and then measure every method, in the processes of one benchmark run.

    Parameters
    ----------
    network : Network
        The network, which already has the given rate.
    rate, straggler : str
    methods : sequence of str
        The methods: "local", "ddp", and names of topologies.
    world_size, num_steps : int
    bucket_cap_mb : float
        The bucket size of every method, in MiB.
    folder : Path
        The folder for the workers' records.
    """
    rows: dict[str, Any] = {name: {} for name in methods if name == "local"}
    rows |= {name: {"bucket_cap_mb": bucket_cap_mb} for name in methods if name == "ddp"}
    rows |= {
        name: {"method": "gossip", "topology": name, "bucket_cap_mb": bucket_cap_mb}
        for name in methods
        if name not in ("local", "ddp")
    }
    settings = Settings(
        model="mlp",
        world_size=world_size,
        local_size=1,
        network=network.name,
        rates=(rate,),
        straggler=straggler,
        repetitions=1,
        warmup_steps=3,
        steps=num_steps,
        num_threads=1,
        seed=0,
        timeout_s=120.0,
        methods=expand(rows, world_size),
        probe_bucket_cap_mb=bucket_cap_mb,
    )
    by_rank = bench_workers.measure(settings, network, folder)
    probe = next(record["probe"] for record in by_rank[0] if "probe" in record)
    step_s = {
        name: statistics.fmean(
            (record["end_s"] - record["start_s"]) / num_steps
            for records in by_rank
            for record in records
            if record.get("method") == name
        )
        for name in methods
    }
    workload = {key: value for key, value in probe["workload"].items() if key not in ("stragglers", "drop_outs")}
    return Case(rate, straggler, probe["cluster"], workload, step_s)


def table(cases: Sequence[Case]) -> str:
    """Return a Markdown table of measured and predicted milliseconds per step, and their ratio."""
    lines = [
        "| rate | stragglers | method | measured, ms | predicted, ms | predicted / measured |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for case in cases:
        for method, step_s in case.step_s.items():
            predicted_s = case.predict(method)
            numbers = f"{1e3 * step_s:.1f} | {1e3 * predicted_s:.1f} | {predicted_s / step_s:.2f}"
            lines.append(f"| {case.rate} | {case.straggler} | {method} | {numbers} |")
    return "\n".join(lines)

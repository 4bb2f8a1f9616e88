"""Prediction of the step time of a run on the cluster that the configuration describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field

import gossip
from gossip.lab.experiments.experiment_build import make_algorithm, make_topology
from gossip.lab.experiments.run_settings import Settings, wrapper_options
from gossip.lab.experiments.validated_models import ConfigurationError, Model, blaming, read, value_of
from topologies import Topology

_NUM_STEPS = 64
"""The number of simulated steps; longer runs are assumed to have the same mean step time."""

_FORWARD_SHARE = 1 / 3
"""The share of the forward pass in the computation of a step: a backward pass costs about two forward passes."""


class _Described(Model):
    """The keys of the section ``cluster`` that :class:`gossip.Cluster`, which checks the others, does not have."""

    model_config = ConfigDict(extra="ignore")

    local_size: int = Field(ge=1)
    compute_us_per_sample: float = Field(ge=0)
    jitter: float = Field(ge=0)


def make_cluster(config: Mapping[str, Any], world_size: int) -> gossip.Cluster:
    """Build the described cluster for a number of ranks.

    Raises ConfigurationError if the ranks do not fill whole nodes, or a value is out of range.
    """
    described = dict(value_of(config, "cluster"))
    read(_Described, described, "cluster")
    local_size = described.pop("local_size")
    del described["compute_us_per_sample"], described["jitter"]
    if world_size % local_size:
        raise ConfigurationError(
            f"launch.world_size={world_size} ranks do not fill nodes of cluster.local_size={local_size}; choose a "
            "multiple of it"
        )
    with blaming("cluster", described):
        return gossip.Cluster(world_size // local_size, local_size, **described)


def predict_step_time_s(config: Mapping[str, Any], summary: Mapping[str, Any]) -> float:
    """Predict the mean time per step in seconds of a completed run, from its configuration and its summary."""
    settings = read(Settings, config)
    topology, algorithm = make_topology(config), make_algorithm(config)
    compute_s = 1e-6 * float(value_of(config, "cluster.compute_us_per_sample")) * settings.batch_size
    num_buckets = math.ceil(summary["parameter_bytes"] / (wrapper_options(config)["bucket_cap_mb"] * 2**20))
    workload = gossip.Workload(
        forward_s=_FORWARD_SHARE * compute_s,
        backward_s=(1 - _FORWARD_SHARE) * compute_s,
        bucket_bytes=(math.ceil(summary["parameter_bytes"] / num_buckets),) * num_buckets,
        jitter=float(value_of(config, "cluster.jitter")),
    )
    method: Topology | str = topology or {"ddp": "ddp", "local": "none"}[settings.method]
    run = gossip.simulate_time(
        method,
        make_cluster(config, settings.launch.world_size),
        workload,
        min(_NUM_STEPS, summary["steps"]),
        algorithm=algorithm,
        compression_ratio=_compression_ratio(summary, topology, algorithm),
    )
    return run.step_time_s


def _compression_ratio(summary: Mapping[str, Any], topology: Topology | None, algorithm: gossip.Algorithm) -> float:
    """Return the ratio of parameter bytes to message bytes, measured in the run, so that it holds for any codec."""
    if topology is None or summary["compression"] == gossip.Uncompressed().describe():
        return 1.0
    schedule = algorithm.schedule(topology)
    rounds = [schedule.round(step) for step in range(min(_NUM_STEPS, summary["steps"]))]
    num_targets = [len(round_.targets(rank)) for round_ in rounds for rank in range(topology.world_size)]
    messages_per_step = algorithm.messages_per_edge * sum(num_targets) / len(num_targets)
    return float(messages_per_step * summary["parameter_bytes"] / summary["bytes_sent_per_step"])

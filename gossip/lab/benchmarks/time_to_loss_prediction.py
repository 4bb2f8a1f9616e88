"""The time of a method's step that :func:`gossip.simulate_time` predicts on a described network."""

from __future__ import annotations

import time
from typing import Any

import torch

import topologies
from gossip import BucketShape, Cluster, Compression, Workload, simulate_time
from gossip.lab.benchmarks.bench_methods import MethodSpecification, gossip_arguments
from gossip.lab.probe.compute_probe import PretendedExchange

_NUM_STEPS = 200  # simulated steps
_DDP_RATIOS = {None: 1.0, "bf16": 2.0, "fp16": 2.0}
_TOPOLOGIES_OF_DECENT_DP = {"complete": "complete", "ring": "ring", "one-peer-exp": "one_peer_exponential"}


def step_time_s(method: MethodSpecification, cluster: Cluster, workload: Workload) -> float | None:
    """Return the predicted mean step time of a method; Decent-DP adapts while communicating, as gossip does by default.

    With a compression, messages are so much smaller as for random values of the size of the largest bucket. None for
    a method that divides a replica among all ranks, which the simulation does not know.
    """
    if method.kind in ("fsdp", "hsdp"):
        return None
    simulated: Any = "ddp" if method.kind == "ddp" else "none"
    options: dict[str, Any] = {}
    if method.kind == "ddp":
        options["compression_ratio"] = _DDP_RATIOS[method.options.get("hook")]
    elif method.kind == "decent_dp":
        name = _TOPOLOGIES_OF_DECENT_DP[method.options.get("topology", "complete")]
        simulated = topologies.build(name, cluster.world_size)
    elif method.kind == "gossip":
        arguments = gossip_arguments(method.options, cluster.world_size)
        simulated, options["algorithm"] = arguments["topology"], arguments.get("algorithm", "adapt_while_communicating")
        if "compression" in arguments:
            numel = max(workload.bucket_bytes) // 4
            options["compression_ratio"] = compression_ratio(arguments["compression"], numel)
    return simulate_time(simulated, cluster, workload, _NUM_STEPS, **options).step_time_s


def compression_ratio(compression: Compression, numel: int) -> float:
    """Return by how much smaller than the values, random and in float32, a message is."""
    values = torch.randn(numel)
    exchange = PretendedExchange(values, BucketShape(0, values), compression, time.perf_counter)
    for step in range(2):  # the first message may be the values in full
        exchange.parts_s(step)
    return values.nbytes / exchange.num_bytes

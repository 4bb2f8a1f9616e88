"""A workload and a cluster for :func:`gossip.simulate_time`, measured on the ranks themselves."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn

from gossip import Cluster, SlowRank, Workload
from gossip.communication.shared_buffers import machine
from gossip.lab.probe.compute_probe import Loss, Optimize, PlainSteps, StepTimes
from gossip.lab.probe.link_probe import Link, gathered, measure_contention, measure_links

_SLOW_FACTOR = 1.25  # a rank that computes longer than the median rank by this factor is a straggler


@dataclass(frozen=True)
class Measured:
    """The result of a measurement, which is the same on every rank.

    ``is_regular`` says whether all nodes hold the same number of consecutive ranks; if not, each rank is treated as a
    node of its own. ``coding_s`` is, by compression, the additional time to encode and mix the messages of a step
    compared with uncompressed ones: the mean over ranks; empty if it was not measured.
    """

    cluster: Cluster
    workload: Workload
    is_regular: bool
    coding_s: Mapping[str, float] = field(default_factory=dict)


def measure(
    module: nn.Module,
    loss: Loss,
    optimizer: Optimize,
    *,
    num_steps: int = 20,
    bucket_cap_mb: float = 25.0,
    message_bytes: int = 8_000_000,
) -> Measured:
    """Measure compute, jitter, latency and bandwidth. Collective; without a process group, there is one rank.

    Steps are as in :class:`.compute_probe.PlainSteps`, and at least 2 are measured; ``message_bytes`` is the size of
    the messages with which the bandwidth is measured.
    """
    if dist.is_initialized():
        dist.barrier()
    plain = PlainSteps(module, loss, optimizer, bucket_cap_mb=bucket_cap_mb)
    measured = gathered(asdict(plain.measure(num_steps)), "gathering the steps' times")
    steps = TypeAdapter(list[StepTimes]).validate_python(measured)
    workload = workload_of(steps)
    device = next(module.parameters()).device
    links: list[Link] = []
    if len(steps) > 1:
        links = measure_links(message_bytes, device)
        step_s = workload.compute_s + workload.mix_s
        contention = measure_contention(plain.make, step_s, message_bytes, device)
        workload = replace(workload, contention=contention)
    machines = gathered(str(machine()), "telling which rank is on which machine")
    local_size = local_size_of(machines)
    cluster = cluster_of(links, len(steps), local_size or 1, on_cpu=device.type == "cpu")
    coding_s = {name: statistics.fmean(times.coding_s[name] for times in steps) for name in steps[0].coding_s}
    return Measured(cluster, workload, local_size is not None, coding_s)


def workload_of(steps: Sequence[StepTimes]) -> Workload:
    """Return the mean step of the ranks that are not stragglers, with its jitter, from the times of each rank."""
    computing = [np.add(times.forward_s, times.backward_s) for times in steps]
    means = [float(durations.mean()) for durations in computing]
    usual_s = statistics.median(means)
    slow = tuple(
        SlowRank(rank, mean / usual_s) for rank, mean in enumerate(means) if usual_s and mean > _SLOW_FACTOR * usual_s
    )
    usual = [times for rank, times in enumerate(steps) if rank not in {straggler.rank for straggler in slow}]
    variances = [float(np.var(durations / durations.mean())) for durations in computing if durations.mean() > 0]
    return Workload(
        forward_s=_mean([times.forward_s for times in usual]),
        backward_s=_mean([times.backward_s for times in usual]),
        bucket_bytes=steps[0].bucket_bytes,
        update_s=_mean([times.update_s for times in usual]),
        mix_s=_mean([times.mix_s for times in usual]),
        jitter=float(np.sqrt(np.mean(variances))) if variances else 0.0,
        stragglers=slow,
    )


def _mean(times: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(itertools.chain.from_iterable(times))


def local_size_of(machines: Sequence[str]) -> int | None:
    """Return the number of ranks per machine, or None unless all hold the same number of consecutive ranks.

    Examples
    --------
    >>> local_size_of("aabb"), local_size_of("abab"), local_size_of("aab")
    (2, None, None)
    """
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    in_order = len(sizes) == len(set(machines))
    return sizes[0] if in_order and len(set(sizes)) == 1 else None


def cluster_of(links: Sequence[Link], world_size: int, local_size: int, *, on_cpu: bool) -> Cluster:
    """Return a cluster with medians over links; a node's bandwidth is the sum of what its ranks sent at the same time.

    The links are as measured by every rank. ``on_cpu``: where parameters are on the CPU, the ranks of a node read each
    other's memory.
    """
    across = [link for link in links if link.rank // local_size != link.peer // local_size]
    inside = [link for link in links if link.rank // local_size == link.peer // local_size]
    by_node: defaultdict[tuple[int, int], float] = defaultdict(float)
    for link in across:
        by_node[link.matching, link.rank // local_size] += link.bytes_per_s
    given: dict[str, Any] = {}
    if across:
        given["latency_us"] = 1e6 * statistics.median(link.latency_s for link in across)
        given["bandwidth_gbps"] = 8e-9 * statistics.median(by_node.values())
    if inside:
        given["local_latency_us"] = 1e6 * statistics.median(link.latency_s for link in inside)
        given["local_bandwidth_gbps"] = 8e-9 * statistics.median(link.bytes_per_s for link in inside)
    return Cluster(world_size // local_size, local_size, shares_memory=on_cpu and local_size > 1, **given)

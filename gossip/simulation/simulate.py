"""Simulation of a run, step by step, with one computed clock per rank, in arrays."""

from dataclasses import dataclass

import numpy as np

from gossip.algorithms import Algorithm, Asynchronous, resolve_algorithm
from gossip.simulation.cluster import Cluster
from gossip.simulation.simulated_methods import AllReduceSteps, AsynchronousSteps, FullyShardedSteps, GossipSteps, Steps
from gossip.simulation.workload import Workload, draw_steps
from topologies import Round, Topology
from topologies.matrix_storage import FloatArray
from topologies.validation import check_integer, check_real


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """The duration of a simulated run, in seconds.

    Attributes
    ----------
    step_time_s : float
        The duration of a step: mean over steps and ranks.
    exposed_wait_s : float
        How long a rank is blocked in a step, waiting for others: mean over steps and ranks.
    total_time_s : float
        The time until the last rank has ended the last step.
    step_ends_s : array, [num_steps]
        When each step ended: mean over ranks.
    """

    step_time_s: float
    exposed_wait_s: float
    total_time_s: float
    step_ends_s: FloatArray


def simulate_time(
    method: Topology | str,
    cluster: Cluster,
    workload: Workload,
    num_steps: int = 1000,
    *,
    algorithm: str | Algorithm = "adapt_while_communicating",
    compression_ratio: float = 1.0,
    seed: int = 0,
) -> SimulatedRun:
    """Return how long a run would take on a cluster. Needs no process group; local.

    Each rank has a clock. Gossip updates bucket after bucket in backward: it waits for the bucket's messages of the
    previous round, mixes, updates and posts the new values, exactly as :class:`gossip.GossipDataParallel` does. DDP
    posts a bucket's all-reduce when its gradients are complete, waits for all of them at the end of backward, and
    updates. A rank's exchanges follow each other in the order of its buckets; ``gossip.simulation.simulated_exchanges``
    describes how long one takes, and which ranks wait for which.

    Parameters
    ----------
    method : Topology or str
        A topology for the number of ranks of the cluster; "ddp", ring all-reduce of gradients; "fsdp", ``fully_shard``
        over all ranks, on CPUs, where torch gathers and reduces between computations; or "none", no exchange.
    cluster : Cluster
        The cluster.
    workload : Workload
        What each rank computes.
    num_steps : int
        The number of steps.
    algorithm : str or Algorithm
        The algorithm of gossip, which determines how many messages are sent in which steps, and when they are needed.
        With "asynchronous", a rank that is asked replies at once, and no rank waits for another's step.
    compression_ratio : float
        The factor by which messages are smaller than ``workload.bucket_bytes``.
    seed : int
        The seed of jitter and delays, which are the same for every method.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range, or the topology is for another number of ranks.

    Examples
    --------
    >>> import topologies
    >>> cluster = Cluster(8, latency_us=0, bandwidth_gbps=1)
    >>> workload = Workload(0.1, 0.2, (25_000_000,) * 4)
    >>> round(simulate_time("ddp", cluster, workload, 10).step_time_s, 2)
    1.55
    >>> round(simulate_time(topologies.build("one_peer_exponential", 8), cluster, workload).step_time_s, 2)
    0.8
    """
    num_steps = check_integer("num_steps", num_steps, minimum=1)
    for name, given, kind in (("cluster", cluster, Cluster), ("workload", workload, Workload)):
        if not isinstance(given, kind):
            raise TypeError(
                f"{name} must be a gossip.{kind.__name__}, got {given!r} ({type(given).__name__}); make one"
            )
    workload.check_ranks(cluster.world_size)
    ratio = check_real("compression_ratio", compression_ratio, "above 0 and finite", example=4.0)
    steps = _steps(method, cluster, workload, ratio, resolve_algorithm(algorithm))
    clock = np.zeros(cluster.world_size)
    step_ends_s = np.empty(num_steps)
    waited_s = 0.0
    for step, draw in enumerate(draw_steps(workload, cluster.world_size, num_steps, seed)):
        clock, waits_s = steps.make(step, clock, draw)
        waited_s += float(waits_s.mean())
        step_ends_s[step] = clock.mean()
    return SimulatedRun(
        step_time_s=float(step_ends_s[-1]) / num_steps,
        exposed_wait_s=waited_s / num_steps,
        total_time_s=float(clock.max()),
        step_ends_s=step_ends_s,
    )


def _steps(method: Topology | str, cluster: Cluster, workload: Workload, ratio: float, algorithm: Algorithm) -> Steps:
    if method == "ddp":
        return AllReduceSteps(cluster, workload, ratio)
    if method == "fsdp":
        return FullyShardedSteps(cluster, workload, ratio)
    if method == "none":
        method = Topology.from_rounds([Round.identity(cluster.world_size)])
    if isinstance(method, Topology):
        cluster.check_topology("method", method)
        if isinstance(algorithm, Asynchronous):
            return AsynchronousSteps(method, cluster, workload, ratio, algorithm)
        return GossipSteps(method, cluster, workload, ratio, algorithm)
    raise ValueError(
        f"method must be a topology, 'ddp', 'fsdp' or 'none', got {method!r}; build a topology with "
        f"topologies.build(name, {cluster.world_size})"
    )

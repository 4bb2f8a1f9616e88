"""Simulation of a run, step by step, with one computed clock per rank, in arrays.

First one step of every rank with each method: when it computes, posts and waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from gossip.algorithms import Algorithm, Asynchronous, resolve_algorithm
from gossip.exchange.distributed_transport import MIN_LARGE_BYTES, shared_groups
from gossip.simulation.cluster import Cluster
from gossip.simulation.simulated_exchanges import ExchangePlan, Groups, plan_exchange
from gossip.simulation.workload import StepDraw, Workload, draw_steps
from topologies import Round, Topology
from topologies.matrix_storage import FloatArray
from topologies.validation import check_integer, check_real


def delayed(ends_s: FloatArray, clock: FloatArray, computing_s: FloatArray, contention: float) -> FloatArray:
    """Return when transfers end while a rank computes for ``computing_s`` from ``clock`` on."""
    return ends_s + contention * np.clip(ends_s - clock, 0.0, computing_s)


class Steps(ABC):
    """Moves the clocks of all ranks through their steps, in order.

    ``free_s``, [n], is when each rank has sent all that it has posted.
    """

    def __init__(self, cluster: Cluster, workload: Workload, compression_ratio: float) -> None:
        self._cluster, self._workload, self._ratio = cluster, workload, compression_ratio
        self._free_s = np.zeros(cluster.world_size)

    @abstractmethod
    def make(self, step: int, clock: FloatArray, draw: StepDraw) -> tuple[FloatArray, FloatArray]:
        """Make one step that the ranks begin at ``clock``, [n], in seconds.

        Returns when each rank has ended, and how long it has waited, [n] each.
        """


def _all_reduce(cluster: Cluster) -> ExchangePlan | None:
    everyone = tuple(range(cluster.world_size))
    return plan_exchange(Round.from_groups(len(everyone), [everyone]), cluster, all_reduces=(everyone,))


class AllReduceSteps(Steps):
    """DDP: a ring all-reduce per bucket, overlapping backward, one after the other; the update follows the last."""

    def __init__(self, cluster: Cluster, workload: Workload, compression_ratio: float) -> None:
        super().__init__(cluster, workload, compression_ratio)
        self._plan = _all_reduce(cluster)

    def make(self, step: int, clock: FloatArray, draw: StepDraw) -> tuple[FloatArray, FloatArray]:  # noqa: ARG002
        workload, plan = self._workload, self._plan
        clock = clock + draw.delay_s + workload.forward_s * draw.factor
        arrived_s = clock
        for num_bytes in workload.bucket_bytes:
            computing_s = workload.backward_s * num_bytes / workload.model_bytes * draw.factor
            self._free_s = delayed(self._free_s, clock, computing_s, workload.contention)
            arrived_s = delayed(arrived_s, clock, computing_s, workload.contention)
            clock = clock + computing_s
            if plan is not None:
                sent_s, arrived_s = plan.run(np.maximum(clock, self._free_s), num_bytes / self._ratio)
                self._free_s = sent_s
        waits_s = np.maximum(arrived_s - clock, 0.0)
        return clock + waits_s + workload.update_s * draw.factor, waits_s


class FullyShardedSteps(Steps):
    """torch's ``fully_shard`` over all ranks on gloo, which computes nothing while it gathers or reduces.

    A bucket's parameters are gathered before its forward pass and again before its backward pass, after which its
    gradients are reduced. Those of the outermost module, which backward reaches last, stay gathered in between. A rank
    updates its shard only.
    """

    def __init__(self, cluster: Cluster, workload: Workload, compression_ratio: float) -> None:
        super().__init__(cluster, workload, compression_ratio)
        n, reduction = cluster.world_size, _all_reduce(cluster)
        self._gathering = self._reduction = reduction  # gloo's reduce_scatter sends what an all-reduce does
        if reduction is not None:
            share = max(n - 1, 1.5) / (2 * (n - 1))  # two ranks, measured: the halves of a part wait for each other
            self._gathering = replace(
                reduction,
                seconds_per_byte=share * reduction.seconds_per_byte,
                coupling=Groups([tuple(range(n))], [n - 1], n),
            )

    def make(self, step: int, clock: FloatArray, draw: StepDraw) -> tuple[FloatArray, FloatArray]:  # noqa: ARG002
        workload, waits_s = self._workload, np.zeros_like(clock)

        def passed(plan: ExchangePlan | None, num_bytes: int, clock: FloatArray) -> FloatArray:
            if plan is None:
                return clock
            arrived_s = plan.run(clock, num_bytes / self._ratio)[1]
            np.add(waits_s, arrived_s - clock, out=waits_s)
            return arrived_s

        clock = clock + draw.delay_s
        for num_bytes in reversed(workload.bucket_bytes):
            clock = passed(self._gathering, num_bytes, clock)
            clock = clock + workload.forward_s * num_bytes / workload.model_bytes * draw.factor
        for number, num_bytes in enumerate(workload.bucket_bytes, 1):
            if number < len(workload.bucket_bytes):
                clock = passed(self._gathering, num_bytes, clock)
            clock = clock + workload.backward_s * num_bytes / workload.model_bytes * draw.factor
            clock = passed(self._reduction, num_bytes, clock)
        return clock + workload.update_s / self._cluster.world_size * draw.factor, waits_s


class GossipSteps(Steps):
    """The wrapper: each bucket waits for its messages, mixes, updates and posts, in backward.

    The algorithm determines the rounds that end the steps, how many messages a bucket sends, and whether they are
    needed at the start of the next forward pass instead of where the bucket is updated. (A bucket with several layers
    is awaited by the module that holds them all.)
    """

    def __init__(
        self, topology: Topology, cluster: Cluster, workload: Workload, compression_ratio: float, algorithm: Algorithm
    ) -> None:
        super().__init__(cluster, workload, compression_ratio)
        self._topology = algorithm.schedule(topology)
        self._algorithm = algorithm
        self._all_reduces = _groups_on_wire(self._topology, cluster, compression_ratio)
        self._plans: dict[tuple[int, bool], ExchangePlan | None] = {}
        num_buckets = len(workload.bucket_bytes)
        self._arrives_s = np.full((num_buckets, cluster.world_size), -np.inf)
        self._posted_in = np.full(self._arrives_s.shape, -1)
        self._shares = [num_bytes / workload.model_bytes for num_bytes in workload.bucket_bytes]

    def make(self, step: int, clock: FloatArray, draw: StepDraw) -> tuple[FloatArray, FloatArray]:
        workload, num_buckets = self._workload, len(self._shares)
        clock = clock + draw.delay_s
        waits_s = np.zeros_like(clock)
        for bucket in range(num_buckets if self._algorithm.before_forward else 0):
            clock = self._combine(step, bucket, clock, draw, waits_s)
        clock = self._compute(workload.forward_s * draw.factor, clock)
        for bucket, share in enumerate(self._shares):
            clock = self._compute(workload.backward_s * share * draw.factor, clock)
            if not self._algorithm.before_forward:
                clock = self._combine(step, bucket, clock, draw, waits_s)
            clock = self._compute(workload.update_s * share * draw.factor, clock)
            self._post(step, bucket, clock)
        return clock, waits_s

    def _compute(self, computing_s: FloatArray, clock: FloatArray) -> FloatArray:
        """Let all ranks compute for a while, which may slow down messages, and return their clocks afterwards."""
        if self._workload.contention:
            self._free_s = delayed(self._free_s, clock, computing_s, self._workload.contention)
            self._arrives_s = delayed(self._arrives_s, clock, computing_s, self._workload.contention)
        return clock + computing_s

    def _combine(self, step: int, bucket: int, clock: FloatArray, draw: StepDraw, waits_s: FloatArray) -> FloatArray:
        """Wait for a bucket's messages, if this step needs them, and mix them; adds to ``waits_s``."""
        posted_in = self._posted_in[bucket, 0]  # all ranks post in the same step
        if posted_in < 0 or step != posted_in + self._algorithm.overlap:
            return clock
        arrives_s = self._arrives_s[bucket].copy()
        wait_s = np.maximum(arrives_s - clock, 0.0)
        waits_s += wait_s
        mix_s = self._workload.mix_s * self._shares[bucket] * draw.factor
        return self._compute(np.where(np.isfinite(arrives_s), mix_s, 0.0), clock + wait_s)

    def _post(self, step: int, bucket: int, clock: FloatArray) -> None:
        num_bytes = self._workload.bucket_bytes[bucket] / self._ratio
        plan = self._plan(step, num_bytes) if self._algorithm.is_exchanged(bucket, step) else None
        if plan is None:
            return
        self._posted_in[bucket] = step
        num_bytes *= self._algorithm.messages_per_edge(step)
        sent_s, arrives_s = plan.run(np.maximum(clock, self._free_s), num_bytes)
        self._free_s = np.where(plan.takes_part, sent_s, self._free_s)
        self._arrives_s[bucket] = np.where(plan.takes_part, arrives_s, -np.inf)

    def _plan(self, step: int, num_bytes: float) -> ExchangePlan | None:
        # The averages of ranks that step independently are no rounds, and do not go through memory.
        is_large = num_bytes >= MIN_LARGE_BYTES and not self._algorithm.is_asynchronous
        number, period = step, self._topology.period
        if period is not None and step >= self._topology.warmup:
            number = self._topology.warmup + (step - self._topology.warmup) % period
        if (number, is_large) not in self._plans:
            if period is None:
                self._plans.clear()  # no round is repeated
            self._plans[number, is_large] = plan_exchange(
                self._topology.round(step),
                self._cluster,
                all_reduces=self._all_reduces if is_large else (),
                reads_memory=is_large and self._cluster.shares_memory and self._ratio == 1.0,
            )
        return self._plans[number, is_large]


class AsynchronousSteps(GossipSteps):
    """The wrapper if ranks step independently: each bucket asks a peer, which replies at once.

    The reply is awaited when the algorithm's ``max_staleness`` steps have passed, and no other peer is asked before
    that.
    """

    _algorithm: Asynchronous

    def _combine(self, step: int, bucket: int, clock: FloatArray, draw: StepDraw, waits_s: FloatArray) -> FloatArray:
        arrives_s, asked_in = self._arrives_s[bucket], self._posted_in[bucket]
        is_due = (asked_in >= 0) & (step - asked_in >= self._algorithm.max_staleness)
        wait_s = np.where(is_due, np.maximum(arrives_s - clock, 0.0), 0.0)
        waits_s += wait_s
        has_come = (asked_in >= 0) & (arrives_s <= clock + wait_s)
        asked_in[has_come] = -1
        mix_s = self._workload.mix_s * self._shares[bucket] * draw.factor
        return self._compute(np.where(has_come, mix_s, 0.0), clock + wait_s)

    def _post(self, step: int, bucket: int, clock: FloatArray) -> None:
        num_bytes = self._workload.bucket_bytes[bucket] / self._ratio
        if (plan := self._plan(step, num_bytes)) is not None:
            asks = plan.takes_part & (self._posted_in[bucket] < 0)
            sent_s, arrives_s = plan.ask(np.maximum(clock, self._free_s), num_bytes)
            self._free_s = np.where(asks, sent_s, self._free_s)
            self._arrives_s[bucket] = np.where(asks, arrives_s, self._arrives_s[bucket])
            self._posted_in[bucket][asks] = step


def _groups_on_wire(topology: Topology, cluster: Cluster, compression_ratio: float) -> Collection[tuple[int, ...]]:
    """Return the groups that all-reduce, as in :class:`gossip.DistributedTransport` on gloo.

    Compressed messages are not added on the wire, and ranks that share memory read it instead.
    """
    if compression_ratio != 1.0:
        return frozenset()
    groups = shared_groups(topology)
    if cluster.shares_memory:
        groups = [group for group in groups if group[0] // cluster.local_size != group[-1] // cluster.local_size]
    return frozenset(groups)


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

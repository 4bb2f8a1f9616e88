"""One step of every rank with each method: when it computes, posts and waits."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from gossip.algorithms import Algorithm, Asynchronous
from gossip.exchange.distributed_transport import MIN_LARGE_BYTES, shared_groups
from gossip.simulation.cluster import Cluster
from gossip.simulation.simulated_exchanges import ExchangePlan, Groups, plan_exchange
from gossip.simulation.workload import StepDraw, Workload
from topologies import Round, Topology
from topologies.matrix_storage import FloatArray


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
        plan = self._plan(step, num_bytes)
        if plan is not None:
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

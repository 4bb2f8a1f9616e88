"""Advice on the choice between all-reduce and gossip for a measured cluster and workload.

A topology is chosen by predicted step times; algorithm, compression and ``every(k)`` by measured convergence, too.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gossip import ALGORITHMS, Cluster, SimulatedRun, SlowRank, Workload, placement, simulate_time
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.compute_probe import COMPRESSION_RATIOS
from topologies import Topology, analysis
from topologies.analysis.description import count
from topologies.reports.comparing import chosen_topologies
from topologies.reports.family_samples import title_of, without_disguises
from topologies.reports.units import aligned, bytes_text, seconds_text
from topologies.topology import DEFAULT

TOLERANCE = 0.01
NUM_STEPS = 200
"""The number of simulated steps of each topology."""
#: A topology whose replicas need more than this factor times ceil(log2 n) rounds to agree is not recommended: its steps
#: are short, but ranks learn less from each other. One peer per round can be exact after ceil(log2 n) rounds.
_MOST_ROUNDS_FACTOR = 4
#: With a larger jitter of a step the measured times say more about the machine's other work than about the training.
_MOST_JITTER = 0.2
DataKind = Literal["alike", "different"]

#: The number of ranks from which on replicas of plain gossip agree too little, whatever their data
#: (docs/algorithms/algorithms.csv).
MANY_RANKS = 32
PERIODS = (1, 2, 4, 8, 16, 32)
#: The exponent of the cost of drift between ranks: with k steps from one exchange to the next, k^0.4 times as many
#: steps are needed to reach a loss, or (k + 1)^0.4 times as many where data differ and messages are mixed a step late
#: (docs/time_to_loss.md).
DRIFT = 0.4
_SAME = 0.05  # predictions that differ by less are equal, however steady the measured times
_PLAIN: tuple[str, Mapping[str, Any]] = ("adapt_while_communicating", {})
_CORRECTED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("integral_correction", {"form": "atc"}),
    ("integral_correction", {"form": "awc"}),
)


@dataclass(frozen=True)
class Predicted:
    """The predictions for a topology; None is all-reduce, whose replicas agree after every step.

    Attributes
    ----------
    order : list of int or None
        The order of the ranks for it, where links between nodes differ.
    messages : float
        The number of messages of the model's size that leave or enter the busiest node per step, or, on a single node,
        the busiest rank; the mean over rounds.
    rounds : int or None
        The number of rounds until 1 % of the worst disagreement is left; None if that never happens.
    rate : float
        The factor by which a disagreement shrinks per round in the long run.
    """

    title: str
    topology: Topology | None
    order: list[int] | None
    run: SimulatedRun
    messages: float
    rounds: int | None
    rate: float


@dataclass(frozen=True)
class Choice:
    """The chosen arguments of :class:`gossip.GossipDataParallel`, and the reason as one sentence.

    The topology is without ``every``, the number of steps from one exchange to the next, and without the ``order`` in
    which ranks take its places, None for their own. ``step_time_s`` is the
    predicted time of a step, ``worth_s`` that in which training learns as much as in one step of all-reduce.
    """

    topology: Topology
    order: list[int] | None
    every: int
    algorithm: str
    algorithm_options: Mapping[str, Any]
    compression: str | None
    step_time_s: float
    worth_s: float
    reason: str

    @property
    def words(self) -> str:
        """The choice in words, to follow the name of the topology."""
        options = "".join(f" with {name}={value}" for name, value in self.algorithm_options.items())
        order = "" if self.order is None else f"order {self.order}, "
        every = f"every({self.every}), " if self.every > 1 else ""
        return f"{order}{every}algorithm {self.algorithm}{options}, compression {self.compression or 'none'}"

    def arguments(self) -> dict[str, Any]:
        """Return the choice as plain data, in the form of the options of the benchmark method ``gossip``."""
        chosen: dict[str, Any] = {
            "topology": {
                **self.topology.options,
                "name": self.topology.name,
                "every": self.every,
                **({} if self.order is None else {"order": self.order}),
            },
            "algorithm": {"name": self.algorithm, **self.algorithm_options},
        }
        return chosen if self.compression is None else {**chosen, "compression": self.compression}


def jitter(workload: Workload, step_s: float) -> float:
    """Return the jitter of a predicted step: that of its computation, of which a step that waits for links has less."""
    return workload.jitter * min(1.0, workload.compute_s / step_s)


def same(workload: Workload, step_s: float) -> float:
    """Return the ratio up to which times are equal to those with this step: what differs within its jitter does not."""
    return 1 + max(_SAME, jitter(workload, step_s))


def placed(topology: Topology, order: list[int] | None) -> Topology:
    """Return the topology with its ranks in this order, or as it is."""
    return topology if order is None else topology.permuted(order)


def choose(measured: Measured, topology: Topology, data: DataKind, order: list[int] | None = None) -> Choice:
    """Choose the algorithm, the compression and ``every(k)`` for a topology with its ranks in an order. Local.

    The criterion is the predicted time to a loss, which is the time of a step times the number of steps needed. Among
    choices that differ from the shortest time by no more than 5 % or the jitter, the one that loses least is taken:
    exact values before compressed ones, the more frequent exchange, and the form of a correction that mixes better.
    """
    cluster, workload = measured.cluster, replace(measured.workload, jitter=0.0)
    is_corrected = data == "different" or cluster.world_size >= MANY_RANKS
    forms = _CORRECTED if is_corrected else (_PLAIN,)
    found = []
    # In increasing order of what they lose; no compression changes the loss (docs/compression.md).
    for every, compression, (name, options) in itertools.product(PERIODS, (None, *COMPRESSION_RATIOS), forms):
        algorithm, ratio = ALGORITHMS.get(name)(**options), COMPRESSION_RATIOS.get(compression or "", 1.0)
        schedule, num_steps = placed(topology, order).every(every), 3 * max(PERIODS)
        run = simulate_time(schedule, cluster, workload, num_steps, algorithm=algorithm, compression_ratio=ratio)
        step_s = run.step_time_s + measured.coding_s.get(compression or "", 0.0) / every
        late = data == "different" and not algorithm.before_forward
        worth_s = step_s * (every + late) ** DRIFT
        found.append(Choice(topology, order, every, name, options, compression, step_s, worth_s, reason=""))
    shortest = min(found, key=lambda choice: choice.worth_s)
    longest_s = same(measured.workload, shortest.step_time_s) * shortest.worth_s
    best = next(choice for choice in found if choice.worth_s <= longest_s)
    why = (
        "data differ, and plain gossip would stop short of all-reduce's loss"
        if data == "different"
        else f"ranks are many ({cluster.world_size}), and plain gossip's would agree too little"
        if is_corrected
        else "data are alike and ranks few, so plain gossip is as good as all-reduce"
    )
    reason = (
        f"{why[0].upper()}{why[1:]}; a step is predicted to take {seconds_text(best.step_time_s)}, of which "
        f"{seconds_text(workload.compute_s)} computes, and uncompressed with an exchange in every step "
        f"{seconds_text(found[0].step_time_s)}."
    )
    return replace(best, reason=reason)


@dataclass(frozen=True)
class Advice:
    """Predictions, ordered by step time; ``str()`` gives the report, whose last line is the recommendation.

    The rows are all-reduce, and topologies with an uncompressed exchange in every step. The ``choice`` is what to use;
    None for one rank.
    """

    measured: Measured
    rows: tuple[Predicted, ...]
    all_reduce: Predicted
    choice: Choice | None

    @property
    def sentence(self) -> str:
        """Whether gossip helps here, what to use and why; or that this cannot be told, and what to do."""
        cluster = self.measured.cluster
        if self.choice is None:
            return "Gossip does not help here: there is one rank, which has nobody to exchange with."
        varies = jitter(self.measured.workload, self.choice.step_time_s)
        equal = f"Differences within the jitter of its step, {100 * varies:.0f} %, count as equal."
        found = f"{self._verdict(self.choice)} {equal}"
        if varies > _MOST_JITTER:
            found = (
                f"Cannot tell whether gossip helps here: the same step varies by {100 * varies:.0f} %, more "
                "than what is to be told apart. Run it again while nothing else computes, with no more ranks than "
                "cores, and measure longer: --steps 100."
            )
        if cluster.num_nodes > 1:
            return found
        return (
            f"{found} All ranks are on one node: links between nodes were not measured, and nothing is said about "
            "them; run gossip probe on several nodes, by torchrun or srun."
        )

    def _verdict(self, choice: Choice) -> str:
        """Whether all-reduce takes longer than the choice to reach a loss, by more than 5 % and the jitter."""
        ddp_s, best = self.all_reduce.run.step_time_s, f"{title_of(choice.topology)}, {choice.words}"
        if ddp_s > same(self.measured.workload, choice.step_time_s) * choice.worth_s:
            return (
                f"Gossip helps here: take {best}. {choice.reason} All-reduce's step takes {seconds_text(ddp_s)}, "
                f"{ddp_s / choice.worth_s:.2f} times as long as this needs to learn as much."
            )
        return (
            f"Gossip does not help here: the best of it, {best}, is predicted to take {seconds_text(choice.worth_s)} "
            f"to learn as much as in all-reduce's step of {seconds_text(ddp_s)}, whose mean is exact; take all-reduce."
        )

    def __str__(self) -> str:
        return "\n".join([*self._what_was_measured(), "", *self._table(), "", *self._legend(), "", self.sentence])

    def _what_was_measured(self) -> list[str]:
        cluster, workload = self.measured.cluster, self.measured.workload
        slow = [straggler for straggler in workload.stragglers if isinstance(straggler, SlowRank)]
        lines = [
            f"Measured on {count(cluster.world_size, 'rank')}, {count(cluster.num_nodes, 'node')}: a step computes "
            f"{seconds_text(workload.compute_s)} (forward {seconds_text(workload.forward_s)}, backward "
            f"{seconds_text(workload.backward_s)}, update {seconds_text(workload.update_s)}), which varies by "
            f"{100 * workload.jitter:.0f} %; gossip mixes for {seconds_text(workload.mix_s)};",
            f"{bytes_text(workload.model_bytes)} of parameters in {count(len(workload.bucket_bytes), 'bucket')}; "
            f"computing holds up the messages beside it for {100 * workload.contention:.0f} % of its time.",
        ]
        if cluster.num_nodes > 1:
            placed = "" if cluster.pair_seconds_per_byte is None else "; each topology has its ranks in the best order"
            rates = f"{cluster.bandwidth_text} Gbit/s of a node each way"
            lines.append(f"Between nodes: {cluster.latency_us:.0f} us, {rates}{placed}.")
        if cluster.local_size > 1:
            lines.append(
                f"Between ranks of a node: {cluster.local_latency_us:.0f} us, {cluster.local_bandwidth_gbps:.3g} "
                f"Gbit/s{'; gossip reads parameters in memory' * cluster.shares_memory}."
            )
        lines += [
            f"Rank {straggler.rank} computes {straggler.factor:.2f} times as long as the others." for straggler in slow
        ]
        if not self.measured.is_regular:
            lines.append("Nodes hold different numbers of ranks, or not in order: each rank counts as a node.")
        return lines

    def _table(self) -> list[str]:
        titles = "method|step, ms|waiting, ms|of ddp's step|messages|rounds to 1 %|time to 1 %|rate"
        header, ddp_s = titles.split("|"), self.all_reduce.run.step_time_s
        return aligned([header, *(_cells(row, ddp_s) for row in self.rows)], "<" + ">" * (len(header) - 1))

    def _legend(self) -> list[str]:
        return [
            "step: simulated by gossip.simulate_time without jitter; messages hide beside computation where they fit.",
            "messages: of the model's size, through the busiest link per step; rounds to 1 %: until so much is left of "
            "the worst disagreement;",
            "time to 1 %: so many steps; rate: by which a disagreement shrinks per round in the long run. A short step "
            "is no convergence:",
            f"recommended is the shortest step among those with at most "
            f"{_most_rounds(self.measured.cluster.world_size)} rounds to "
            f"1 % ({_MOST_ROUNDS_FACTOR} log2 n); of those equal within the jitter, {DEFAULT}, the default, or else "
            "the fewest rounds.",
        ]


def advise(measured: Measured, data: DataKind = "alike") -> Advice:
    """Predict the step times of all-reduce and of topologies, and choose among them. Local.

    The data are "alike" or "different": whether all ranks draw from the same. The topologies are all registered ones
    that support the world size, without those that repeat another's exchanges. One of them is complete, which agrees at
    once.
    """
    # Steps that are alike differ by what else the machine does: waiting for each other because of that is no barrier.
    cluster, workload = measured.cluster, replace(measured.workload, jitter=0.0)
    n = cluster.world_size
    ddp = simulate_time("ddp", cluster, workload, NUM_STEPS)
    all_reduce = Predicted("ddp", None, None, ddp, 2.0 * (n - 1) / n, 1, 0.0)
    if n == 1:
        return Advice(measured, (all_reduce,), all_reduce, None)
    topologies = without_disguises(chosen_topologies(None, n, cluster.local_size))
    rows = [_predict(topology, cluster, workload) for topology in topologies if topology.doubly_stochastic]
    good = [row for row in rows if row.rounds is not None and row.rounds <= _most_rounds(n)]
    shortest = min(row.run.step_time_s for row in good)
    best = min(
        (row for row in good if row.run.step_time_s <= same(measured.workload, shortest) * shortest),
        key=lambda row: (row.title != DEFAULT, row.rounds, row.messages, row.title),
    )
    assert best.topology is not None
    ranked = sorted([all_reduce, *rows], key=lambda row: (row.run.step_time_s, row.rounds or math.inf, row.title))
    return Advice(measured, tuple(ranked), all_reduce, choose(measured, best.topology, data, best.order))


def _predict(topology: Topology, cluster: Cluster, workload: Workload) -> Predicted:
    traffic = analysis.traffic(topology, local_size=cluster.local_size if cluster.num_nodes > 1 else 1)
    best = list(placement(topology, cluster))
    orders = [None] if best == sorted(best) else [None, best]
    runs = [simulate_time(placed(topology, order), cluster, workload, NUM_STEPS) for order in orders]
    run, order = min(zip(runs, orders, strict=True), key=lambda pair: pair[0].step_time_s)
    return Predicted(
        title=title_of(topology),
        topology=topology,
        order=order,
        run=run,
        messages=sum(round_.busiest_node for round_ in traffic.rounds) / len(traffic.rounds) / traffic.every,
        rounds=analysis.rounds_to(topology, TOLERANCE),
        rate=analysis.consensus_rate(topology),
    )


def _most_rounds(world_size: int) -> int:
    return _MOST_ROUNDS_FACTOR * max(1, math.ceil(math.log2(world_size)))


def _cells(row: Predicted, ddp_s: float) -> tuple[str, ...]:
    run = row.run
    return (
        row.title,
        f"{1e3 * run.step_time_s:.2f}",
        f"{1e3 * run.exposed_wait_s:.2f}",
        f"{run.step_time_s / ddp_s:.2f}" if ddp_s else "-",
        f"{row.messages:.3g}",
        "never" if row.rounds is None else str(row.rounds),
        "never" if row.rounds is None else seconds_text(row.rounds * run.step_time_s),
        f"{row.rate:.4f}",
    )

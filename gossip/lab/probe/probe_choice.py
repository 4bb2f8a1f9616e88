"""Choice of algorithm, compression and ``every(k)`` by predicted step times and measured convergence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gossip import ALGORITHMS, Workload, simulate_time
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.compute_probe import COMPRESSION_RATIOS
from topologies import Topology
from topologies.reports.units import seconds_text

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
class Choice:
    """The chosen arguments of :class:`gossip.GossipDataParallel`, and the reason as one sentence.

    The topology is without ``every``, the number of steps from one exchange to the next. ``step_time_s`` is the
    predicted time of a step, ``worth_s`` that in which training learns as much as in one step of all-reduce.
    """

    topology: Topology
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
        every = f"every({self.every}), " if self.every > 1 else ""
        return f"{every}algorithm {self.algorithm}{options}, compression {self.compression or 'none'}"

    def arguments(self) -> dict[str, Any]:
        """Return the choice as plain data, in the form of the options of the benchmark method ``gossip``."""
        chosen: dict[str, Any] = {
            "topology": {**self.topology.options, "name": self.topology.name, "every": self.every},
            "algorithm": {"name": self.algorithm, **self.algorithm_options},
        }
        return chosen if self.compression is None else {**chosen, "compression": self.compression}


def same(workload: Workload) -> float:
    """Return the ratio up to which predicted times are equal: what differs less than the measured jitter does not."""
    return 1 + max(_SAME, workload.jitter)


def choose(measured: Measured, topology: Topology, data: DataKind) -> Choice:
    """Choose the algorithm, the compression and ``every(k)`` for a topology. Local.

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
        run = simulate_time(
            topology.every(every), cluster, workload, 3 * max(PERIODS), algorithm=algorithm, compression_ratio=ratio
        )
        step_s = run.step_time_s + measured.coding_s.get(compression or "", 0.0) / every
        late = data == "different" and not algorithm.before_forward
        worth_s = step_s * (every + late) ** DRIFT
        found.append(Choice(topology, every, name, options, compression, step_s, worth_s, reason=""))
    shortest_s = min(choice.worth_s for choice in found)
    best = next(choice for choice in found if choice.worth_s <= same(measured.workload) * shortest_s)
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

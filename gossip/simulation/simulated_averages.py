"""Simulation, on computed clocks, of which ranks average after which steps if they step independently."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gossip.algorithms import Asynchronous
from gossip.exchange.recording import Average, Recording
from gossip.simulation.cluster import Cluster
from gossip.simulation.workload import Workload, draw_steps
from topologies import Topology
from topologies.matrix_storage import FloatArray
from topologies.validation import check_integer


@dataclass
class _Rank:
    """The state of a rank, with the rules of ``gossip.exchange.pair_averaging``."""

    step: int = 0  # the step that it computes
    shown: int = -1
    asked: tuple[int, int] | None = None  # the partner, and the step after which it was asked
    waiting: list[tuple[int, int]] = field(default_factory=list)
    have_asked: set[int] = field(default_factory=set)
    made: list[Average] = field(default_factory=list)  # averages that have not entered the parameters
    is_held_up: bool = False


def simulate_averages(
    topology: Topology,
    cluster: Cluster,
    workload: Workload,
    num_steps: int,
    *,
    algorithm: Asynchronous | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> Recording:
    """Return what ranks that step independently would do on a cluster, for virtual workers to replay.

    Each rank has a clock, on which its steps take as long as in :func:`gossip.simulate_time`. All buckets of a step are
    requested at its end; a request and its reply travel like one message of the whole model.

    Parameters
    ----------
    topology : Topology
        The topology, for the number of ranks of the cluster.
    cluster : Cluster
        The cluster.
    workload : Workload
        What each rank computes, with the number of buckets of the model.
    num_steps : int
        The number of steps of each rank; with ``seconds``, the maximum.
    algorithm : Asynchronous, optional
        The algorithm.
    seconds : float, optional
        The time after which no rank begins a step.
    seed : int
        The seed of jitter and delays.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range, or the topology is for another number of ranks.

    Examples
    --------
    >>> import gossip, topologies
    >>> workload = Workload(0.01, 0.02, (1_000_000,), stragglers=(gossip.SlowRank(0, 2.0),))
    >>> recording = simulate_averages(topologies.build("ring", 4), Cluster(4), workload, 1000, seconds=2.99)
    >>> recording.num_steps
    [50, 100, 100, 100]
    """
    num_steps = check_integer("num_steps", num_steps, minimum=1)
    cluster.check_topology("topology", topology)
    workload.check_ranks(cluster.world_size)
    algorithm = algorithm or Asynchronous()
    draws = list(draw_steps(workload, cluster.world_size, num_steps, seed))
    durations_s = np.stack([draw.delay_s + workload.compute_s * draw.factor for draw in draws])
    schedule, until_s = algorithm.schedule(topology), np.inf if seconds is None else seconds
    return _Run(schedule, algorithm.max_staleness, cluster, workload, durations_s, until_s).recording()


class _Run:
    """The events of a run in the order of their times; ``durations_s``, [num_steps, n], is what each step takes."""

    def __init__(
        self,
        schedule: Topology,
        max_staleness: int,
        cluster: Cluster,
        workload: Workload,
        durations_s: FloatArray,
        until_s: float,
    ) -> None:
        self._schedule, self._max_staleness, self._until_s = schedule, max_staleness, until_s
        self._cluster, self._workload, self._durations_s = cluster, workload, durations_s
        self._ranks = [_Rank() for _ in range(cluster.world_size)]
        self._averages: list[Average] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def recording(self) -> Recording:
        """Run until all ranks have ended and nothing is in flight."""
        for rank in range(len(self._ranks)):
            self._begin_step(0.0, rank)
        while self._events:
            time_s, _, happen, details = heapq.heappop(self._events)
            happen(time_s, *details)
        for state in self._ranks:
            self._enter(state, is_read=True)
        return Recording(self._averages, [state.step for state in self._ranks])

    def _plan(self, time_s: float, happen: Callable[..., None], *details: Any) -> None:
        """Let something happen at a time; simultaneous events are in the order in which they were planned."""
        heapq.heappush(self._events, (time_s, next(self._numbers), happen, details))

    def _begin_step(self, now_s: float, rank: int) -> None:
        step = self._ranks[rank].step
        if step < len(self._durations_s) and now_s < self._until_s:
            self._plan(now_s + self._durations_s[step, rank], self._end_step, rank)

    def _end_step(self, now_s: float, rank: int) -> None:
        state = self._ranks[rank]
        if state.asked is not None and state.asked[1] <= state.step - self._max_staleness:
            state.is_held_up = True
            return
        self._enter(state, is_read=False)
        if state.asked is None:
            partner = next(iter(self._schedule.round(state.step).peers(rank)), None)
            has_met, state.have_asked, state.shown = partner in state.have_asked, set(), state.step
            if partner is not None and not has_met:
                state.asked = partner, state.step
                self._plan(now_s + self._one_way_s(rank, partner), self._on_question, partner, rank, state.step)
        state.step += 1
        self._begin_step(now_s, rank)

    def _one_way_s(self, rank: int, partner: int) -> float:
        cluster, num_bytes = self._cluster, self._workload.model_bytes
        if rank // cluster.local_size == partner // cluster.local_size:
            return cluster.local_latency_us * 1e-6 + cluster.local_seconds_per_byte * num_bytes
        return cluster.latency_us * 1e-6 + cluster.seconds_per_byte * num_bytes

    def _on_question(self, now_s: float, rank: int, asking: int, asked_at: int) -> None:
        state = self._ranks[rank]
        if state.asked is not None and state.asked[0] == asking:
            self._on_answer(now_s, rank, asking, asked_at)
        elif state.shown < 0 or (state.asked is not None and asking < rank):
            self._plan(now_s + self._cluster.latency_us * 1e-6, self._on_answer, asking, rank, None)
        elif state.asked is not None:
            state.waiting.append((asking, asked_at))
        else:
            state.made.append(Average(rank, state.shown, 0, asking, asked_at))
            state.have_asked.add(asking)
            self._plan(now_s + self._one_way_s(rank, asking), self._on_answer, asking, rank, state.shown)

    def _on_answer(self, now_s: float, rank: int, partner: int, shown: int | None) -> None:
        state = self._ranks[rank]
        if shown is not None:
            state.made.append(Average(rank, state.shown, 0, partner, shown))
        state.asked = None
        waiting, state.waiting = state.waiting, []
        for asking, asked_at in waiting:
            self._on_question(now_s, rank, asking, asked_at)
        if state.is_held_up:
            state.is_held_up = False
            self._plan(now_s, self._end_step, rank)

    def _enter(self, state: _Rank, *, is_read: bool) -> None:
        made, state.made = state.made, []
        for bucket in range(len(self._workload.bucket_bytes)):
            self._averages += [average._replace(bucket=bucket, entered=state.step, is_read=is_read) for average in made]

"""Which pairs are measured, and what is made of their times."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import on_ranks

from gossip.lab.probe import cluster_measuring
from gossip.lab.probe.cluster_measuring import (
    Link,
    cluster_of,
    local_size_of,
    matchings,
    measure_contention,
    workload_of,
)
from gossip.lab.probe.compute_probe import StepTimes
from gossip.simulation import SlowRank


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 32, 33, 100])
def test_matchings_are_of_all_pairs_or_hold_a_ring_and_each_rank_once_at_a_time(n: int) -> None:
    found = matchings(n)
    pairs = sorted(tuple(sorted(pair)) for matching in found for pair in matching)
    assert len(set(pairs)) == len(pairs)
    if n <= 32:
        assert pairs == list(itertools.combinations(range(n), 2))
    else:
        assert {(rank, rank + 1) for rank in range(n - 1)} <= set(pairs)
        assert len(found) <= 7
    assert all(len(set(itertools.chain.from_iterable(matching))) == 2 * len(matching) for matching in found)


@pytest.mark.parametrize(("n", "local_size", "inside", "across"), [(6, 2, 1, 3), (6, 3, 3, 1), (24, 12, 5, 1)])
def test_matchings_of_nodes_pair_all_their_ranks_at_once(n: int, local_size: int, inside: int, across: int) -> None:
    found = matchings(n, local_size)
    assert len(found) == inside + across
    for number, pairs in enumerate(found):
        assert all((one // local_size == other // local_size) == (number < inside) for one, other in pairs)
        nodes = {(one // local_size, other // local_size) for one, other in pairs}
        assert number < inside or len(pairs) == local_size * len(nodes)


class Clock:
    """A clock that computing moves, and each look at it a little."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        self._now += 1e-4
        return self._now

    def compute(self) -> None:
        self._now += 0.01


@on_ranks(2)
def test_messages_that_are_there_before_a_step_begins_were_taken_nothing_from() -> None:
    def start(name: str, run: Callable[[], None], **_: Any) -> threading.Thread:
        run()
        thread = threading.Thread(name=name)
        thread.start()
        return thread

    clock = Clock()
    with (
        mock.patch.object(cluster_measuring, "daemon_threads", SimpleNamespace(start=start)),
        mock.patch.object(cluster_measuring, "time", clock),
    ):
        assert measure_contention(clock.compute, 0.01, 1000, torch.device("cpu")) == pytest.approx(0, abs=1e-9)


def links_of(local_size: int) -> list[Link]:
    """As 4 ranks measure them: 1 GB/s and 5 us between 0 and 1, and 2 and 3; 1 MB/s and 300 us between all others."""
    pairs = itertools.chain.from_iterable(matchings(4, local_size))
    ends = itertools.chain.from_iterable((pair, pair[::-1]) for pair in pairs)
    return [Link(one, other, *((5e-6, 1e9) if one // 2 == other // 2 else (3e-4, 1e6))) for one, other in ends]


def test_cluster_adds_up_what_the_ranks_of_a_node_send_at_once() -> None:
    cluster = cluster_of(links_of(2), 4, 2, on_cpu=True)
    assert (cluster.num_nodes, cluster.local_size, cluster.shares_memory) == (2, 2, True)
    assert cluster.latency_us == pytest.approx(300)
    assert cluster.bandwidth_gbps == pytest.approx(2 * 8e-3)
    assert cluster.local_latency_us == pytest.approx(5)
    assert cluster.local_bandwidth_gbps == pytest.approx(8)
    assert not cluster_of(links_of(2), 4, 2, on_cpu=False).shares_memory
    alone = cluster_of(links_of(1), 4, 1, on_cpu=True)  # every rank a node
    np.testing.assert_allclose(np.array(alone.bandwidth_gbps)[:2, 1:], [[8, 8e-3, 8e-3], [0, 8e-3, 8e-3]])
    assert not alone.shares_memory


@pytest.mark.parametrize(
    ("factor", "num_changed", "num_left_out", "has_matrix"),
    [(1.6, 1, 0, False), (5, 1, 0, True), (1.6, 2, 0, True), (1.4, 2, 0, False), (5, 2, 1, False)],
)
def test_nodes_have_a_bandwidth_for_each_pair_if_all_were_measured_and_differ(
    factor: float, num_changed: int, num_left_out: int, has_matrix: bool
) -> None:
    """One pair of nodes, or all that a node sends."""
    links = [Link(rank, peer, 1e-4, 1e8) for rank, peer in itertools.permutations(range(3), 2)]
    for place in range(num_changed):
        links[place] = dataclasses.replace(links[place], bytes_per_s=factor * 1e8)
    cluster = cluster_of(links[: len(links) - num_left_out], 3, 1, on_cpu=True)
    of_0 = [0, 0.8 * factor, 0.8 * (factor if num_changed == 2 else 1)]
    wanted = [of_0, [0.8, 0, 0.8], [0.8, 0.8, 0]] if has_matrix else 0.8
    np.testing.assert_allclose(cluster.bandwidth_gbps, wanted)


@pytest.mark.parametrize(
    ("machines", "local_size"), [("a", 1), ("abc", 1), ("aabb", 2), ("aaa", 3), ("aba", None), ("aab", None)]
)
def test_nodes_are_as_the_cluster_has_them_or_each_rank_is_one(machines: str, local_size: int | None) -> None:
    assert local_size_of(machines) == local_size


def _times(scale: float) -> StepTimes:
    return StepTimes([0.9 * scale, 1.1 * scale], [1.8 * scale, 2.2 * scale], [0.5, 0.7], [0.1, 0.1], (400, 100), {})


def test_workload_is_the_mean_step_of_the_usual_ranks() -> None:
    workload = workload_of([_times(1.0), _times(1.0), _times(3.0)])
    assert workload.forward_s == pytest.approx(1.0)
    assert workload.backward_s == pytest.approx(2.0)
    assert workload.update_s == pytest.approx(0.6)
    assert workload.mix_s == pytest.approx(0.1)
    assert workload.bucket_bytes == (400, 100)
    assert workload.jitter == pytest.approx(0.1)  # each rank's steps vary by 10 % of its own mean
    (straggler,) = workload.stragglers
    assert isinstance(straggler, SlowRank)
    assert (straggler.rank, straggler.factor) == (2, pytest.approx(3.0))
    assert workload_of([_times(2.0)]).stragglers == ()


def test_the_rate_is_that_of_the_usual_message(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([0.1, 0.2, 5.0, 0.2])  # with what an idle link lets through, and one that was held up
    monkeypatch.setattr(cluster_measuring, "_send", lambda *_: next(times_s))
    assert cluster_measuring._bytes_per_s(1, 8_000_000, torch.device("cpu")) == pytest.approx(4e7)

"""Simulated runs whose times can be written down, and predictions of step times that were measured."""

import dataclasses
import functools
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from tiers import rest_is_slow

import gossip
import topologies
from gossip import Cluster, RandomDelays, SlowRank, Workload, placement, simulate_time
from topologies import Topology

FREE = {"latency_us": 0.0, "bandwidth_gbps": math.inf, "local_latency_us": 0.0, "local_bandwidth_gbps": math.inf}
GIGABIT = {**FREE, "bandwidth_gbps": 1.0}
SIZES = (1, 2, 5, 8)
PLAIN = Workload(0.1, 0.2, (40_000_000, 10_000_000), update_s=0.05)
LATE = Workload(1, 1, (1,), stragglers=(SlowRank(4, 2.0),))

fail = functools.partial(gossip.simulate_goodput, Cluster(4), gossip.Failures(1.0))
simulate = functools.partial(simulate_time, cluster=Cluster(4), workload=PLAIN)


def _method(name: str, n: int) -> str | Topology:
    return name if name in ("ddp", "none") else topologies.build(name, n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["ddp", "none", "ring", "one_peer_exponential", "complete", "base"])
@pytest.mark.parametrize("algorithm", ["adapt_while_communicating", "adapt_then_combine", "asynchronous"])
def test_a_network_that_costs_nothing_leaves_the_computation(n: int, name: str, algorithm: str) -> None:
    run = simulate_time(_method(name, n), Cluster(n, **FREE), PLAIN, 7, algorithm=algorithm)
    np.testing.assert_allclose(run.step_ends_s, 0.35 * np.arange(1, 8))
    assert run.step_time_s == pytest.approx(0.35)
    assert run.total_time_s == pytest.approx(7 * 0.35)
    assert run.exposed_wait_s == pytest.approx(0)


@pytest.mark.parametrize("n", [2, 5])
def test_ddp_pays_for_a_ring_all_reduce(n: int) -> None:
    workload = Workload(0.0, 0.0, (25_000_000,))
    run = simulate_time("ddp", Cluster(n, **{**GIGABIT, "latency_us": 50.0}), workload, 4)
    turns = 2 * (n - 1) if n > 2 else 1
    messages = 2 * (n - 1) / n
    assert run.step_time_s == pytest.approx(messages * 0.2 + turns * 50e-6)
    assert run.exposed_wait_s == pytest.approx(run.step_time_s)


@pytest.mark.parametrize(("n", "gathered"), [(1, 0), (2, 3 / 4), (4, 3 / 4), (5, 4 / 5)])
def test_fully_sharded_ranks_gather_and_reduce_between_computations(n: int, gathered: float) -> None:
    """Each updates its shard; the bucket that backward reaches last, of 10 MB, is gathered once and the other twice."""
    run = simulate_time("fsdp", Cluster(n, **{**GIGABIT, "latency_us": 50.0}), PLAIN, 3)
    turns = 3 * (n - 1) + 2 * (2 * (n - 1) if n > 2 else n - 1)
    passes_s = 8e-9 * (90e6 * gathered + 50e6 * 2 * (n - 1) / n) + turns * 50e-6
    np.testing.assert_allclose(np.diff(run.step_ends_s), 0.1 + 0.2 + 0.05 / n + passes_s)
    assert run.exposed_wait_s == pytest.approx(passes_s)


def test_asynchronous_ranks_are_as_fast_as_each_is_by_itself() -> None:
    workload = Workload(0.01, 0.02, (1_250_000,), stragglers=(SlowRank(0, 3.0),))
    topology, cluster = topologies.build("ring", 4), Cluster(4, **GIGABIT)
    run = simulate_time(topology, cluster, workload, 50, algorithm="asynchronous")
    np.testing.assert_allclose(run.step_ends_s, (3 + 1 + 1 + 1) / 4 * 0.03 * np.arange(1, 51))
    together = simulate_time(topology, cluster, workload, 50)
    assert together.step_time_s == pytest.approx(3 * 0.03, rel=0.05)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_asynchronous_ranks_wait_for_an_answer_after_so_many_steps(max_staleness: int) -> None:
    """A question takes 0.1 s and its answer as much, and the next one is asked when it is there."""
    workload = Workload(0.01, 0.02, (12_500_000,))
    run = simulate_time(
        topologies.build("ring", 4), Cluster(4, **GIGABIT), workload, 60, algorithm=gossip.Asynchronous(max_staleness)
    )
    np.testing.assert_allclose(run.step_ends_s[max_staleness:] - run.step_ends_s[:-max_staleness], 0.2)
    assert run.exposed_wait_s == pytest.approx(0.2 / max_staleness - 0.03, rel=0.05)


@pytest.mark.parametrize(("contention", "step_s"), [(0.0, 0.1), (0.5, 0.1 + 0.5 * 0.03), (1.0, 0.1 + 0.03)])
def test_computing_holds_up_the_messages_beside_it(contention: float, step_s: float) -> None:
    topology = topologies.build("one_peer_hypercube", 4)
    workload = Workload(0.01, 0.02, (12_500_000,), contention=contention)
    run = simulate_time(topology, Cluster(4, **GIGABIT), workload, 20)
    np.testing.assert_allclose(np.diff(run.step_ends_s), step_s)
    hidden = dataclasses.replace(workload, forward_s=0.1, backward_s=0.2)  # there is time enough
    run = simulate_time(topology, Cluster(4, **GIGABIT), hidden, 20)
    np.testing.assert_allclose(np.diff(run.step_ends_s), 0.3)


@pytest.mark.parametrize("contention", [0.0, 0.5])
def test_all_reduce_is_held_up_by_backward_but_not_by_waiting(contention: float) -> None:
    cluster = Cluster(2, **GIGABIT)
    one = Workload(0.1, 2.0, (12_500_000,), contention=contention)  # it leaves when all is computed
    assert simulate_time("ddp", cluster, one, 1).step_time_s == pytest.approx(0.1 + 2.0 + 0.1)
    two = Workload(0.0, 0.1, (25_000_000, 25_000_000), contention=contention)  # the first beside half of backward
    assert simulate_time("ddp", cluster, two, 3).step_time_s == pytest.approx(0.05 + 0.2 + contention * 0.05 + 0.2)


@pytest.mark.parametrize(
    ("bucket_bytes", "step_s"),
    [
        ((12_500_000,), 0.3 + 0.1),
        ((12_500_000, 12_500_000), 0.3 + 0.1),  # the first has arrived when the second leaves
        ((25_000_000, 12_500_000), 0.1 + 0.2 * 2 / 3 + 0.2 + 0.1),  # the first leaves after 2/3 of backward
    ],
)
def test_adapt_then_combine_hides_messages_only_until_forward(bucket_bytes: tuple[int, ...], step_s: float) -> None:
    topology = topologies.build("one_peer_hypercube", 4)
    workload = Workload(0.1, 0.2, bucket_bytes)
    run = simulate_time(topology, Cluster(4, **GIGABIT), workload, 50, algorithm="adapt_then_combine")
    np.testing.assert_allclose(np.diff(run.step_ends_s), step_s)


@pytest.mark.parametrize(
    ("algorithm", "exposed_s"),
    [
        (gossip.DiLoCo(period=4), 0.2),
        (gossip.DiLoCo(period=4, form="awc"), 0.1),
        (gossip.StreamingDiLoCo(period=4, parts=1, overlap=2), 0.0),
        (gossip.NoLoCo(period=4), 0.4),
        (gossip.GASLoC(period=4), 0.2),
        (gossip.FactoredGossip(period=4, overlap=2), 0.0),
    ],
    ids=lambda value: value.describe() if isinstance(value, gossip.Algorithm) else "",
)
def test_averages_now_and_then_are_hidden_as_long_as_they_may_be_late(
    algorithm: gossip.Algorithm, exposed_s: float
) -> None:
    topology, workload = topologies.build("complete", 2), Workload(0.05, 0.05, (25_000_000,))
    run = simulate_time(topology, Cluster(2, **GIGABIT), workload, 40, algorithm=algorithm)
    np.testing.assert_allclose(np.diff(run.step_ends_s[5::4]), 4 * 0.1 + exposed_s)


def test_memory_that_ranks_share_costs_nothing_but_for_all_reduce_of_gradients() -> None:
    cluster = Cluster(1, 4, **{**FREE, "local_bandwidth_gbps": 1.0})
    sharing = dataclasses.replace(cluster, shares_memory=True)
    workload = Workload(0.0, 0.0, (12_500_000,))
    for name, messages in (("one_peer_hypercube", 1.0), ("ring", 2.0), ("complete", 1.5)):
        sent, read = (simulate_time(_method(name, 4), each, workload, 5) for each in (cluster, sharing))
        np.testing.assert_allclose(np.diff(sent.step_ends_s), 0.1 * messages)
        assert read.total_time_s == 0.0
    assert simulate_time("ddp", sharing, workload, 1).step_time_s == pytest.approx(0.15)
    small = Workload(0.0, 0.0, (2**16 - 1,))
    assert simulate_time(_method("ring", 4), sharing, small, 5).total_time_s > 0


def racks(n: int, local_size: int = 1) -> Cluster:
    """Nodes of two racks, 1 Gbit/s in each and 0.1 between them."""
    of_first = np.arange(n) < n // 2
    gbps = np.where(of_first[:, None] == of_first, 1.0, 0.1)
    return Cluster(n, local_size, **{**FREE, "bandwidth_gbps": gbps})


ACROSS = {"ddp": 1.5, "one_peer_hypercube": 0.55, "one_peer_exponential": 1.0, "ring": 1.0, "complete": 1.5}


@pytest.mark.parametrize(("method", "step_s"), ACROSS.items())
def test_messages_are_as_fast_as_the_slowest_of_unequal_links(method: str, step_s: float) -> None:
    """All-reduce's ring crosses between racks twice; on "ring" both messages leave at once, and one of them crosses."""
    ends_s = simulate_time(_method(method, 4), racks(4), Workload(0.0, 0.0, (12_500_000,)), 41).step_ends_s
    assert (ends_s[-1] - ends_s[0]) / 40 == pytest.approx(step_s)


def test_a_link_is_as_fast_each_way_as_with_the_fastest_peer() -> None:
    """Two messages at once leave and enter each rank."""
    fast = [[0, 1, 0.1, 1], [1, 0, 1, 0.1], [0.1, 1, 0, 1], [1, 0.1, 1, 0]]
    slow = [[0, 0.1, 0.1, 0.1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    for gbps, step_s in ((fast, 0.2), (slow, 2.0), (np.transpose(slow), 2.0)):
        cluster = Cluster(4, **{**FREE, "bandwidth_gbps": gbps})
        run = simulate_time(_method("ring", 4), cluster, Workload(0.0, 0.0, (12_500_000,)), 9)
        np.testing.assert_allclose(np.diff(run.step_ends_s[1:]), step_s)


@pytest.mark.parametrize(
    ("n", "local_size", "faster"), [(4, 1, 2 / 1.1), (4, 2, 5.5 / 4.15), (16, 1, 4 / 1.3), (128, 1, 7 / 1.6)]
)
def test_placed_ranks_cross_between_racks_in_one_round_of_log2_n(n: int, local_size: int, faster: float) -> None:
    """In one round of 4 nodes with 2 ranks four ranks all-reduce, 1.5 messages, and in the other each node sends 4."""
    cluster, workload = racks(n, local_size), Workload(0.0, 0.0, (12_500_000,))
    topology = topologies.build("one_peer_exponential", n).product(topologies.build("complete", local_size))
    order = placement(topology, cluster)
    assert sorted(order) == list(range(n * local_size))
    assert np.reshape(order, (n, local_size))[:, 0].tolist() == [rank for rank in order if rank % local_size == 0]
    as_they_are, placed = (simulate_time(each, cluster, workload, 241) for each in (topology, topology.permuted(order)))
    assert as_they_are.total_time_s / placed.total_time_s == pytest.approx(faster, rel=0.02)


def test_ranks_stay_where_they_are_if_no_order_is_better() -> None:
    assert placement(_method("one_peer_exponential", 4), Cluster(4)) == (0, 1, 2, 3)
    for n, name in itertools.product((4, 9), ("complete", "ring")):
        assert placement(_method(name, n), racks(n)) == tuple(range(n))
    pairs = _method("one_peer_exponential", 4)
    assert placement(pairs.every(65), racks(4)) == placement(pairs, racks(4)) != (0, 1, 2, 3)
    slow, star = Cluster(3, bandwidth_gbps=[[0, 0.1, 0.1], [1, 0, 1], [1, 1, 0]]), topologies.build("star", 3)
    assert placement(star, slow) == placement(topologies.build("complete", 3).then(star, after=9), slow) == (1, 0, 2)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_orders_found_by_exchanging_two_nodes_are_the_best_of_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(7, bandwidth_gbps=np.exp(np.random.default_rng(seed).normal(size=(7, 7))))
    base = topologies.build("base", 7)
    best = placement(base, cluster)
    monkeypatch.setattr(sys.modules["gossip.simulation.placement"], "_MOST_TRIED", 6)
    runs = (simulate_time(base.permuted(order), cluster, PLAIN, 60) for order in (best, placement(base, cluster)))
    assert len({run.total_time_s for run in runs}) == 1


def test_compressed_messages_are_smaller_and_not_summed_on_the_wire() -> None:
    workload = Workload(0.0, 0.0, (12_500_000,))
    complete, pairs = topologies.build("complete", 5), topologies.build("one_peer_exponential", 4)
    four = simulate_time(complete, Cluster(5, **GIGABIT), workload, 20, compression_ratio=4.0)
    np.testing.assert_allclose(np.diff(four.step_ends_s), 4 * 0.1 / 4)
    one = simulate_time(pairs, Cluster(4, **GIGABIT), workload, 20, compression_ratio=4.0)
    np.testing.assert_allclose(np.diff(one.step_ends_s), 0.1 / 4)


def test_local_steps_send_in_every_third_round_only() -> None:
    topology = topologies.build("one_peer_hypercube", 4).every(3)
    run = simulate_time(topology, Cluster(4, **GIGABIT), Workload(0.0, 0.01, (12_500_000,)), 30)
    steps = np.diff(run.step_ends_s)
    assert sorted(steps.round(6).tolist()) == [0.01] * 20 + [0.1] * 9


@pytest.mark.parametrize("name", ["ddp", "one_peer_exponential", "ring", "random_matching"])
def test_everybody_goes_at_the_pace_of_a_slow_rank(name: str) -> None:
    """Max-plus: the slowest rank's factor is everybody's in the long run, and all-reduce's at once."""
    workload = dataclasses.replace(PLAIN, stragglers=(SlowRank(3, 2.5),))
    run = simulate_time(_method(name, 8), Cluster(8, **FREE), workload, 200)
    assert np.diff(run.step_ends_s)[-50:].mean() == pytest.approx(2.5 * 0.35, rel=0.01)
    if name == "ddp":  # only its own update, the last thing that a rank does, keeps nobody
        np.testing.assert_allclose(np.diff(run.step_ends_s), 2.5 * 0.35)


def test_a_seed_draws_the_same_for_every_method() -> None:
    workload = dataclasses.replace(PLAIN, jitter=0.2, stragglers=(RandomDelays(0.1),))
    runs = [simulate_time("none", Cluster(4), workload, 30, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0].step_ends_s, runs[1].step_ends_s)
    assert not np.array_equal(runs[0].step_ends_s, runs[2].step_ends_s)
    gossip = simulate_time(Topology.from_rounds([topologies.Round.identity(4)]), Cluster(4), workload, 30)
    np.testing.assert_allclose(gossip.step_ends_s, runs[0].step_ends_s)


def test_jitter_leaves_the_mean_of_the_steps_as_it_is() -> None:
    run = simulate_time("none", Cluster(8), dataclasses.replace(PLAIN, jitter=0.5), 500, seed=0)
    assert run.step_time_s == pytest.approx(0.35, rel=0.02)


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 7])
def test_a_late_rank_holds_up_those_that_its_messages_reach(num_pieces: int) -> None:
    """On a ring every piece of 512 KiB passes the delay on by one edge to each side; everybody else goes on."""
    n, held_up = 16, 2 * num_pieces
    workload = Workload(1.0, 0.0, (num_pieces * 2**19,), stragglers=(SlowRank(3, 4.0),))
    ends = simulate_time(topologies.build("ring", n), Cluster(n, **FREE), workload, 2).step_ends_s
    assert ends[0] == pytest.approx((4.0 + (n - 1) * 1.0) / n)
    assert ends[1] == pytest.approx((8.0 + held_up * 4.0 + (n - 1 - held_up) * 2.0) / n)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Cluster(0), ValueError, "num_nodes must be at least 1"),
        (lambda: Cluster(2, bandwidth_gbps=0.0), ValueError, "bandwidth_gbps must be above 0"),
        (lambda: Cluster(2, bandwidth_gbps=[[0, 1], [0, 0]]), ValueError, r"bandwidth_gbps\[1\]\[0\] must be above 0"),
        (lambda: Cluster(2, bandwidth_gbps=[[1, 2], [3]]), ValueError, "for each of the 2 nodes, got .*1, 2"),
        (lambda: Cluster(3, bandwidth_gbps=[[1, 1], [1, 1]]), ValueError, "for each of the 3 nodes"),
        (lambda: placement("ring", Cluster(4)), TypeError, "topology must be a Topology, got 'ring' .str.; make one"),
        (lambda: placement(topologies.build("ring", 5), Cluster(4)), ValueError, "topology is a topology for 5 ranks"),
        (lambda: Cluster(2, latency_us=-1.0), ValueError, "latency_us must be at least 0"),
        (lambda: Workload(0.0, 0.0, ()), ValueError, "bucket_bytes is empty"),
        (lambda: Workload(0.0, 0.0, (1,), stragglers=(1.0,)), TypeError, "stragglers must be a tuple of SlowRank or"),
        (lambda: Workload(0.0, 0.0, (1,), contention=1.5), ValueError, "contention must be between 0 and 1"),
        (lambda: SlowRank(0, 0.0), ValueError, "factor must be above 0"),
        (lambda: RandomDelays(0.1, probability=1.5), ValueError, "probability must be between 0 and 1"),
        (lambda: gossip.Failures(0.0), ValueError, "hours_per_failure must be above 0"),
        (lambda: gossip.Failures(1.0, detect_s=-1.0), ValueError, "detect_s must be at least 0"),
        (lambda: gossip.Failures(1.0, min_share=2.0), ValueError, "min_share must be between 0 and 1"),
        (lambda: fail("ddp"), ValueError, "method must be one of 'restart', 'quorum', 'gossip'"),
        (lambda: fail("gossip", hours=0), ValueError, "hours must be above 0"),
        (lambda: simulate("ring"), ValueError, "method must be a topology, 'ddp', 'fsdp' or 'none', got 'ring'"),
        (lambda: simulate(topologies.build("ring", 5)), ValueError, "5 ranks, but the cluster has 4 x 1 = 4"),
        (lambda: simulate("ddp", compression_ratio=0.0), ValueError, "compression_ratio must be above 0 and finite"),
        (lambda: simulate("ddp", cluster=4), TypeError, "cluster must be"),
        (lambda: simulate("ddp", workload=LATE), ValueError, "stragglers names rank 4"),
    ],
)
def test_what_cannot_be_simulated_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


STRAGGLERS = {"none": (), "exponential": (RandomDelays(0.05),), "one_slow": (SlowRank(0, 2.0),)}


class Case(BaseModel):
    """Steps with one rate of every link and one kind of straggler, beside the probe, which was made without it."""

    rate: str
    straggler: str
    cluster: Cluster
    workload: Workload
    step_s: dict[str, float]

    def predict(self, method: str) -> float:
        """Of many steps, so that the prediction is free of the random variation of the measured ones."""
        workload = dataclasses.replace(self.workload, stragglers=STRAGGLERS[self.straggler])
        simulated = method if method == "ddp" else topologies.build(method, self.cluster.world_size)
        return simulate_time(simulated, self.cluster, workload, 1000).step_time_s


# What a probe of four hosts found, the times of steps on them, and the machine: those of one that is busy with tests
# could not be held to anything.
RECORDED = json.loads((Path(__file__).parent / "measured_steps.json").read_text())
CASES = [Case.model_validate(case) for case in RECORDED["cases"]]
PREDICTED = ("ddp", "one_peer_exponential", "ring", "complete")
RATES = ("100mbit", "200mbit", "1000mbit")


def test_recorded_are_all_rates_with_and_without_stragglers() -> None:
    recorded = {(case.rate, case.straggler) for case in CASES}
    assert recorded == set(itertools.product(RATES, STRAGGLERS))
    assert all(case.cluster.num_nodes == 4 for case in CASES)
    assert all(set(PREDICTED) <= set(case.step_s) for case in CASES)


@pytest.mark.parametrize("method", PREDICTED)
@pytest.mark.parametrize("case", rest_is_slow(CASES), ids=lambda case: f"{case.rate}-{case.straggler}")
def test_predictions_are_within_20_percent_of_recorded_measurements(case: Case, method: str) -> None:
    ratio = case.predict(method) / case.step_s[method]
    assert 0.8 < ratio < 1.2, f"recorded measurement on {RECORDED['machine']}"

"""What a probe recommends on networks where the answer is known."""

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

import topologies
from gossip.lab.probe import probe
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.probe import Advice, Predicted, advise
from gossip.simulation import Cluster, SlowRank, Workload
from topologies.reports.comparing import chosen_topologies
from topologies.reports.family_samples import title_of, without_disguises

WORKLOAD = Workload(0.03, 0.06, (25_000_000,) * 2, update_s=0.01, mix_s=0.005)


def measured(n: int, gbps: float, workload: Workload = WORKLOAD, local_size: int = 1) -> Measured:
    cluster = Cluster(n // local_size, local_size, latency_us=50.0, bandwidth_gbps=gbps)
    return Measured(cluster, workload, is_regular=True)


def of_named(of: Measured, names: Sequence[str]) -> Advice:
    """The advice if there were no other topologies."""
    there = [topologies.build(name, of.cluster.world_size) for name in names]
    with mock.patch.object(probe, "chosen_topologies", return_value=there):
        return advise(of)


def helps(advice: Advice) -> bool:
    return advice.sentence.startswith("Gossip helps here: take ")


def best_of(advice: Advice) -> Predicted:
    assert advice.choice is not None
    return next(row for row in advice.rows if row.topology is advice.choice.topology)


def test_advice_on_a_slow_network_is_one_peer_per_round() -> None:
    """50 MB at 1 Gbit/s: 0.4 s for one message, twice that for all-reduce."""
    advice = advise(measured(8, 1.0))
    best = best_of(advice)
    assert best.messages == pytest.approx(1.0)
    assert best.rounds == 3  # of those that send as little, none agrees sooner
    assert best.run.step_time_s == pytest.approx(0.4, rel=0.02)
    assert advice.all_reduce.run.step_time_s == pytest.approx(0.7, rel=0.2)
    assert str(advice).splitlines()[-1] == advice.sentence
    assert advice.sentence.startswith(f"Gossip helps here: take {best.title}, ")


def test_advice_on_a_fast_network_is_all_reduce() -> None:
    advice = advise(measured(8, 400.0))
    assert advice.sentence.startswith("Gossip does not help here: ")
    assert "; take all-reduce. Differences within the jitter of its step, 0 %, count as equal." in advice.sentence


def test_advice_for_one_rank() -> None:
    advice = advise(measured(1, 1.0))
    assert [row.title for row in advice.rows] == ["ddp"]
    assert "there is one rank" in str(advice).splitlines()[-1]


@pytest.mark.parametrize(("n", "local_size"), [(3, 1), (8, 4)])
@mock.patch.object(probe, "NUM_STEPS", 5)
def test_rows_are_ddp_and_every_topology_that_serves_the_ranks(n: int, local_size: int) -> None:
    advice = advise(measured(n, 1.0, local_size=local_size))
    serving = without_disguises(t for t in chosen_topologies(None, n, local_size) if t.doubly_stochastic)
    assert sorted(row.title for row in advice.rows) == sorted(["ddp", *map(title_of, serving)])
    times = [row.run.step_time_s for row in advice.rows]
    assert times == sorted(times)
    lines = str(advice).splitlines()
    for row in advice.rows:
        assert any(line.startswith(f"{row.title} ") for line in lines)


def test_what_hardly_agrees_is_not_recommended_however_short_its_steps() -> None:
    advice = of_named(measured(8, 1.0), ["directed_ring", "complete"])
    assert [row.title for row in advice.rows] == ["directed_ring", "complete", "ddp"]
    assert best_of(advice).title == "complete"


@mock.patch.object(probe, "NUM_STEPS", 5)
def test_report_tells_of_slow_ranks_and_nodes() -> None:
    workload = Workload(0.03, 0.06, (25_000_000,) * 2, stragglers=(SlowRank(3, 2.5),))
    cluster = Cluster(2, 4, latency_us=50.0, bandwidth_gbps=1.0, shares_memory=True)
    text = str(advise(Measured(cluster, workload, is_regular=False)))
    assert "Rank 3 computes 2.50 times as long as the others." in text
    assert "Between nodes: 50 us, 1 Gbit/s of a node each way." in text
    assert "gossip reads parameters in memory" in text
    assert "each rank counts as a node" in text
    assert f"at most {4 * math.ceil(math.log2(8))} rounds" in text


def test_one_node_is_not_told_to_be_idle_in_every_second_round() -> None:
    """On one node local_global is complete in every other round: the shortest step, and no topology of its own."""
    cluster = Cluster(1, 4, local_latency_us=50.0, local_bandwidth_gbps=1.0)
    advice = advise(Measured(cluster, WORKLOAD, is_regular=True))
    assert advice.choice is not None
    topology = advice.choice.topology
    assert not any(topology.round(t).is_identity for t in range(topology.period or 16))
    assert "local_global" not in str(advice)
    assert advice.sentence.endswith(
        "links between nodes were not measured, and nothing is said about them; run gossip probe on several nodes, by "
        "torchrun or srun."
    )


@pytest.mark.parametrize(("jitter", "tells"), [(0.2, True), (0.25, False)])
@pytest.mark.parametrize("gbps", [1.0, 400.0])
def test_of_times_that_vary_much_nothing_is_said_but_what_to_do(jitter: float, gbps: float, tells: bool) -> None:
    workload = Workload(0.03, 0.06, (25_000_000,) * 2, jitter=jitter)
    advice = of_named(measured(8, gbps, workload), ["one_peer_exponential"])
    assert advice.sentence.startswith("Gossip " if tells else "Cannot tell whether gossip helps here: the same step ")
    assert ("varies by 2" in advice.sentence) == ("--steps 100" in advice.sentence) == (not tells)
    assert helps(advice) == (tells and gbps == 1.0)


def test_of_a_step_that_waits_for_links_computing_varies_less() -> None:
    advice = of_named(measured(8, 0.005, Workload(0.03, 0.06, (25_000_000,) * 2, jitter=0.5)), ["one_peer_exponential"])
    assert helps(advice)


def test_what_differs_within_the_jitter_is_equal_and_the_default_is_preferred() -> None:
    """At 20 Gbit/s all-reduce takes 13 % longer, and every topology hides its messages."""
    steady, unsteady = (
        of_named(measured(8, 20.0, replace(WORKLOAD, jitter=jitter)), ["complete", "one_peer_exponential"])
        for jitter in (0.0, 0.15)
    )
    assert (helps(steady), helps(unsteady)) == (True, False)
    assert best_of(unsteady).title == "one_peer_exponential"
    assert "Differences within the jitter of its step, 14 %, count as equal." in unsteady.sentence

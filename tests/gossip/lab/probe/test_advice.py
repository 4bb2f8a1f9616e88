"""What a probe recommends on networks where the answer is known."""

import math
from dataclasses import replace

import pytest

import topologies
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.probe_advice import advise
from gossip.simulation import Cluster, SlowRank, Workload
from topologies.reports.comparing import chosen_topologies
from topologies.reports.disguises import without_disguises
from topologies.reports.family_samples import title_of

WORKLOAD = Workload(0.03, 0.06, (25_000_000,) * 2, update_s=0.01, mix_s=0.005)


def measured(n: int, gbps: float, workload: Workload = WORKLOAD, local_size: int = 1) -> Measured:
    cluster = Cluster(n // local_size, local_size, latency_us=50.0, bandwidth_gbps=gbps)
    return Measured(cluster, workload, is_regular=True)


def test_advice_on_a_slow_network_is_one_peer_per_round() -> None:
    """50 MB at 1 Gbit/s: 0.4 s for one message, twice that for all-reduce."""
    advice = advise(measured(8, 1.0))
    assert advice.helps
    assert advice.best is not None
    assert advice.best.messages == pytest.approx(1.0)
    assert advice.best.rounds == 3  # of those that send as little, none agrees sooner
    assert advice.best.run.step_time_s == pytest.approx(0.4, rel=0.02)
    assert advice.all_reduce.run.step_time_s == pytest.approx(0.7, rel=0.2)
    assert str(advice).splitlines()[-1] == advice.sentence
    assert advice.sentence.startswith(f"Gossip helps here: take {advice.best.title}, ")


def test_advice_on_a_fast_network_is_all_reduce() -> None:
    advice = advise(measured(8, 400.0))
    assert not advice.helps
    assert advice.sentence.startswith("Gossip does not help here: ")
    assert "; take all-reduce. Differences within the jitter of 0 % count as equal." in advice.sentence


def test_advice_for_one_rank() -> None:
    advice = advise(measured(1, 1.0))
    assert not advice.helps
    assert [row.title for row in advice.rows] == ["ddp"]
    assert "there is one rank" in str(advice).splitlines()[-1]


@pytest.mark.parametrize(("n", "local_size"), [(3, 1), (8, 4)])
def test_rows_are_ddp_and_every_topology_that_serves_the_ranks(n: int, local_size: int) -> None:
    advice = advise(measured(n, 1.0, local_size=local_size), num_steps=5)
    serving = without_disguises(t for t in chosen_topologies(None, n, local_size) if t.doubly_stochastic)
    assert sorted(row.title for row in advice.rows) == sorted(["ddp", *map(title_of, serving)])
    times = [row.run.step_time_s for row in advice.rows]
    assert times == sorted(times)
    lines = str(advice).splitlines()
    for row in advice.rows:
        assert any(line.startswith(f"{row.title} ") for line in lines)


def test_what_hardly_agrees_is_not_recommended_however_short_its_steps() -> None:
    chosen: list[str | topologies.Topology] = [
        topologies.build("one_peer_hypercube", 8).every(20),
        "one_peer_hypercube",
        "complete",
    ]
    advice = advise(measured(8, 1.0), topologies=chosen)
    assert advice.rows[0].topology is chosen[0]
    assert advice.best is not None
    assert advice.best.title == "one_peer_hypercube"
    alone = advise(measured(8, 1.0), topologies=chosen[:1])
    assert alone.best is None
    assert "no topology brings 8 ranks to agree soon enough" in alone.sentence


def test_report_tells_of_slow_ranks_and_nodes() -> None:
    workload = Workload(0.03, 0.06, (25_000_000,) * 2, stragglers=(SlowRank(3, 2.5),))
    cluster = Cluster(2, 4, latency_us=50.0, bandwidth_gbps=1.0, shares_memory=True)
    text = str(advise(Measured(cluster, workload, is_regular=False), num_steps=5))
    assert "Rank 3 computes 2.50 times as long as the others." in text
    assert "Between nodes: 50 us, 1 Gbit/s of a node each way." in text
    assert "gossip reads parameters in memory" in text
    assert "each rank counts as a node" in text
    assert f"at most {4 * math.ceil(math.log2(8))} rounds" in text


def test_one_node_is_not_told_to_be_idle_in_every_second_round() -> None:
    """On one node local_global is complete in every other round: the shortest step, and no topology of its own."""
    cluster = Cluster(1, 4, local_latency_us=50.0, local_bandwidth_gbps=1.0)
    advice = advise(Measured(cluster, WORKLOAD, is_regular=True))
    assert advice.best is not None
    assert advice.best.topology is not None
    assert not any(advice.best.topology.round(t).is_identity for t in range(advice.best.topology.period or 16))
    assert "local_global" not in str(advice)
    assert advice.sentence.endswith(
        "links between nodes were not measured, and nothing is said about them; run gossip probe on several nodes, by "
        "torchrun or srun."
    )
    asked = advise(Measured(cluster, WORKLOAD, is_regular=True), topologies=["complete", "local_global"])
    assert {row.title for row in asked.rows} == {"ddp", "complete", "local_global (local_size=4)"}


@pytest.mark.parametrize(("jitter", "tells"), [(0.2, True), (0.21, False)])
@pytest.mark.parametrize("gbps", [1.0, 400.0])
def test_of_times_that_vary_much_nothing_is_said_but_what_to_do(jitter: float, gbps: float, tells: bool) -> None:
    workload = Workload(0.03, 0.06, (25_000_000,) * 2, jitter=jitter)
    advice = advise(measured(8, gbps, workload), topologies=["one_peer_exponential"], num_steps=20)
    assert advice.sentence.startswith("Gossip " if tells else "Cannot tell whether gossip helps here: the same step's ")
    assert ("varies by 21 %" in advice.sentence) == ("--steps 100" in advice.sentence) == (not tells)
    assert advice.helps == (tells and gbps == 1.0)


def test_what_differs_within_the_jitter_is_equal_and_the_default_is_preferred() -> None:
    """At 20 Gbit/s all-reduce takes 13 % longer, and every topology hides its messages."""
    steady, unsteady = (
        advise(measured(8, 20.0, replace(WORKLOAD, jitter=jitter)), topologies=["complete", "one_peer_exponential"])
        for jitter in (0.0, 0.15)
    )
    assert (steady.helps, unsteady.helps) == (True, False)
    assert unsteady.best is not None
    assert unsteady.best.title == "one_peer_exponential"
    assert "Differences within the jitter of 15 % count as equal." in unsteady.sentence

"""What a probe recommends, and what it chooses with a topology, where the answer is known."""

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

import topologies
from gossip.lab.probe import probe_advice
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.probe_advice import DRIFT, MANY_RANKS, Advice, Choice, DataKind, Predicted, advise, choose
from gossip.simulation import Cluster, SlowRank, Workload, placement
from topologies.reports.comparing import chosen_topologies
from topologies.reports.family_samples import title_of, without_disguises

WORKLOAD = Workload(0.03, 0.06, (25_000_000,) * 2, update_s=0.01, mix_s=0.005)


def measured(n: int, gbps: float, workload: Workload = WORKLOAD, local_size: int = 1) -> Measured:
    cluster = Cluster(n // local_size, local_size, latency_us=50.0, bandwidth_gbps=gbps)
    return Measured(cluster, workload, is_regular=True)


def of_named(of: Measured, names: Sequence[str]) -> Advice:
    """The advice if there were no other topologies."""
    there = [topologies.build(name, of.cluster.world_size) for name in names]
    with mock.patch.object(probe_advice, "chosen_topologies", return_value=there):
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
@mock.patch.object(probe_advice, "NUM_STEPS", 5)
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


@mock.patch.object(probe_advice, "NUM_STEPS", 5)
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


def test_advice_where_links_differ_is_of_ranks_in_other_places() -> None:
    """By its order the default crosses between two racks in both rounds; only in one of them otherwise."""
    gbps = [[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]]
    of = Measured(Cluster(4, bandwidth_gbps=gbps), WORKLOAD, is_regular=True)
    advice = of_named(of, ["one_peer_exponential", "complete"])
    assert advice.choice is not None
    assert advice.choice.arguments()["topology"] == {"name": "one_peer_exponential", "every": 1, "order": [0, 2, 1, 3]}
    assert best_of(advice).run.step_time_s == pytest.approx((0.4 + 0.1) / 2, rel=0.1)
    assert "uncompressed with an exchange in every step 237.5 ms" in advice.sentence
    assert "take one_peer_exponential, order [0, 2, 1, 3], algorithm" in advice.sentence
    assert "1 to 10 Gbit/s of a node each way" in str(advice)


def test_an_order_that_is_predicted_to_take_longer_is_not_advised() -> None:
    """Three ranks all-reduce along a ring by their numbers, which an order of the places does not know of."""
    gbps = [[0, 2, 0.5, 10, 1], [2, 0, 10, 5, 5], [0.5, 10, 0, 2, 10], [10, 5, 2, 0, 1], [1, 5, 10, 1, 0]]
    cluster, base = Cluster(5, bandwidth_gbps=gbps), topologies.build("base", 5, k=3)
    with mock.patch.object(probe_advice, "chosen_topologies", return_value=[base]):
        advice = advise(Measured(cluster, WORKLOAD, is_regular=True))
    assert [row.order for row in advice.rows] == [None, None]
    assert placement(base, cluster) != (0, 1, 2, 3, 4)


ONE_BUCKET = Workload(0.03, 0.06, (10_000_000,), update_s=0.01)


def chosen(
    gbps: float, data: DataKind = "alike", n: int = 4, workload: Workload = ONE_BUCKET, **coding_s: float
) -> Choice:
    cluster = Cluster(n, latency_us=50.0, bandwidth_gbps=gbps)
    topology = topologies.build("one_peer_exponential", n)
    return choose(Measured(cluster, workload, True, coding_s), topology, data)


def test_choice_on_a_fast_network_is_the_exact_values_in_every_step() -> None:
    """10 MB at 10 Gbit/s: 8 ms, beside a step of 100 ms."""
    choice = chosen(10.0)
    assert (choice.every, choice.compression, choice.algorithm) == (1, None, "adapt_while_communicating")
    assert choice.worth_s == choice.step_time_s == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(("gbps", "compression"), [(1.0, None), (0.5, "bf16"), (0.25, "int8"), (0.15, "int4")])
def test_choice_is_the_mildest_compression_that_hides_the_messages(gbps: float, compression: str | None) -> None:
    choice = chosen(gbps)
    assert (choice.every, choice.compression) == (1, compression)


def test_choice_counts_what_coding_takes() -> None:
    assert chosen(0.5).compression == "bf16"
    assert chosen(0.5, bf16=0.05, int8=0.0, int4=0.05).compression == "int8"
    assert chosen(0.5, bf16=1.0, int8=1.0, int4=1.0).compression is None


def test_choice_on_a_slow_network_exchanges_less_often_the_slower_it_is() -> None:
    """A message of 10 MB / 7.97 at 10 Mbit/s takes 1 s, ten steps."""
    choices = [chosen(gbps) for gbps in (0.1, 0.02, 0.01, 0.001)]
    every = [choice.every for choice in choices]
    assert every == sorted(every)
    assert every[0] < every[2] < every[3]
    for choice in choices:
        assert choice.worth_s == pytest.approx(choice.step_time_s * choice.every**DRIFT)


@pytest.mark.parametrize(
    ("data", "n", "is_corrected"), [("alike", 4, False), ("different", 4, True), ("alike", MANY_RANKS, True)]
)
def test_choice_corrects_where_data_differ_or_ranks_are_many(data: DataKind, n: int, is_corrected: bool) -> None:
    choice = chosen(1.0, data, n)
    assert (choice.algorithm == "integral_correction") == is_corrected
    said = "Data differ" if data == "different" else "Ranks are many (32)" if is_corrected else "Data are alike"
    assert choice.reason.startswith(said)


@pytest.mark.parametrize(
    ("gbps", "compression", "form"), [(100.0, None, "atc"), (0.9, "int4", "atc"), (0.3, "int8", "awc")]
)
def test_choice_mixes_in_the_same_step_while_that_takes_less_than_the_steps_it_saves(
    gbps: float, compression: str | None, form: str
) -> None:
    """Messages of 10 MB: what is awaited before the next forward pass hides beside nothing."""
    choice = chosen(gbps, "different")
    assert (choice.every, choice.compression, choice.algorithm_options) == (1, compression, {"form": form})
    late = form == "awc"
    assert choice.worth_s == pytest.approx(choice.step_time_s * (choice.every + late) ** DRIFT)


def test_choice_as_a_benchmark_takes_it() -> None:
    assert chosen(0.15, "different").arguments() == {
        "topology": {"name": "one_peer_exponential", "every": 1},
        "algorithm": {"name": "integral_correction", "form": "awc"},
        "compression": "int4",
    }

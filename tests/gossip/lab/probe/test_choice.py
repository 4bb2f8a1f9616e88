"""What a probe chooses with a topology, where the answer is known."""

import pytest

import topologies
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.probe import DRIFT, MANY_RANKS, Choice, DataKind, choose
from gossip.simulation import Cluster, Workload

WORKLOAD = Workload(0.03, 0.06, (10_000_000,), update_s=0.01)


def chosen(
    gbps: float, data: DataKind = "alike", n: int = 4, workload: Workload = WORKLOAD, **coding_s: float
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

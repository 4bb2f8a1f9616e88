"""Predicted times of a run on the described cluster."""

import math
from typing import Any

import pytest
from composing import composed

import gossip
import topologies
from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.lab.sweeps.sweep_document import make_cluster, predict_step_time_s

SUMMARY: dict[str, Any] = {
    "steps": 12,
    "parameter_bytes": 4_000_000,
    "bytes_sent_per_step": 8_000_000.0,
    "compression": gossip.Uncompressed().describe(),
}
STEADY = ("cluster.jitter=0", "cluster.compute_us_per_sample=100", "training.batch_size=30", "launch.world_size=6")
COMPUTE_S = 0.003


def test_prediction_without_communication_is_the_computation() -> None:
    config = composed(*STEADY, "method=local")
    assert predict_step_time_s(config, {**SUMMARY, "bytes_sent_per_step": 0.0}) == pytest.approx(COMPUTE_S)


def test_prediction_of_all_reduce_follows_the_bandwidth() -> None:
    slow = predict_step_time_s(composed(*STEADY, "method=ddp", "cluster.bandwidth_gbps=1"), SUMMARY)
    fast = predict_step_time_s(composed(*STEADY, "method=ddp", "cluster.bandwidth_gbps=1000"), SUMMARY)
    assert slow - fast == pytest.approx(2 * 5 / 6 * 4e6 * 8e-9, rel=0.01)


@pytest.mark.parametrize(("compression", "ratio"), [(gossip.Uncompressed().describe(), 1.0), ("a quarter", 4.0)])
def test_prediction_of_a_topology_is_the_simulation(compression: str, ratio: float) -> None:
    config = composed(*STEADY, "topology=ring", "algorithm=adapt_then_combine", "wrapper.bucket_cap_mb=2")
    summary = {**SUMMARY, "compression": compression, "bytes_sent_per_step": 8e6 / ratio}
    workload = gossip.Workload(COMPUTE_S / 3, COMPUTE_S * 2 / 3, (2_000_000, 2_000_000))
    wanted = gossip.simulate_time(
        topologies.build("ring", 6),
        make_cluster(config, 6),
        workload,
        12,
        algorithm="adapt_then_combine",
        compression_ratio=ratio,
    )
    assert predict_step_time_s(config, summary) == pytest.approx(wanted.step_time_s)


@pytest.mark.parametrize(
    ("options", "steps", "messages"),
    [
        (("topology=ring", "topology.every=100"), 1000, 2 / 100),
        (("topology=ring", "topology.every=100", "topology.warmup_rounds=10"), 1000, (5 * 10 + 2 * 9) / 1000),
        (("topology=complete", "algorithm=streaming_diloco"), 200, 5 / 50),
        (("topology=complete", "algorithm=diloco"), 40, 0.0),
        (("topology=ring", "launch.world_size=1"), 12, 0.0),
    ],
)
def test_compression_is_what_was_sent_in_place_of_messages(
    options: tuple[str, ...], steps: int, messages: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, simulate = [], gossip.simulate_time
    monkeypatch.setattr(
        gossip,
        "simulate_time",
        lambda *args, **named: found.append(named["compression_ratio"]) or simulate(*args, **named),
    )
    sent = {"compression": "a quarter", "bytes_sent_per_step": messages * 4e6 / 4, "steps": steps}
    assert predict_step_time_s(composed(*STEADY, *options), SUMMARY | sent) > COMPUTE_S * (messages > 0)
    assert found == [pytest.approx(4.0 if messages else 1.0, rel=0.05)]  # the last cycle is not whole


def test_cluster_has_as_many_nodes_as_the_ranks_fill() -> None:
    cluster = make_cluster(composed("cluster.local_size=2", "cluster.bandwidth_gbps=inf"), 6)
    assert (cluster.num_nodes, cluster.local_size, cluster.bandwidth_gbps) == (3, 2, math.inf)
    with pytest.raises(ConfigurationError, match=r"world_size=5 ranks do not fill nodes of cluster\.local_size=2"):
        make_cluster(composed("cluster.local_size=2"), 5)

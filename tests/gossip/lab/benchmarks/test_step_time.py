"""Every method trains and is measured, in ranks of one launch, with the delays of stragglers."""

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmark_cases import step_time_case

import gossip
from gossip.lab.benchmarks import bench_methods, step_time
from gossip.lab.benchmarks.bench_methods import expand
from gossip.lab.benchmarks.harness import run, run_workers
from gossip.lab.benchmarks.step_time import StepTime, predicted_s, scaled, straggler_delay_s
from gossip.lab.benchmarks.workloads import WORKLOADS
from gossip.lab.probe.cluster_measuring import Measured

KINDS: dict[str, dict[str, Any]] = {
    "local": {},
    "ddp": {"bucket_cap_mb": 1, "hook": "bf16"},
    "gossip": {"topology": "one_peer_hypercube", "bucket_cap_mb": 5},
}
SHARDED: dict[str, dict[str, Any]] = {
    "hsdp": {},
    "fsdp": {},
    "gossip fsdp": {"topology": "ring", "shard": "fsdp"},
    "gossip optimizer": {"topology": "ring", "shard": "optimizer", "compression": "int8"},
    "gossip whole": {"topology": "ring", "shard": "whole"},
    "local fsdp": {"shard": "fsdp"},
}


def records(folder: Path, kinds: dict[str, dict[str, Any]], **options: Any) -> list[list[dict[str, Any]]]:
    """Measure methods on two ranks."""
    methods = {name: {"method": name.split()[0], **given} for name, given in kinds.items()}
    return run_workers(StepTime, step_time_case(methods=methods, **options), None, folder)


@pytest.mark.slow
def test_worker_measures_every_method_in_alternating_order(tmp_path: Path) -> None:
    for carried, *found in records(tmp_path, KINDS, model="small_mlp", straggler="one_slow", repetitions=2):
        assert carried["goodput_bytes_per_s"] > 1e6
        assert [each["method"] for each in found] == [*KINDS, *reversed(KINDS)]
        assert [each["repetition"] for each in found] == [0] * 3 + [1] * 3
        by_method = {each["method"]: each for each in found[:3]}
        for each in by_method.values():
            assert len(each["step_s"]) == 3
            assert each["peak_memory_bytes"] > 3 * 4.2e6  # parameters, gradients, momentum
            assert 0 < each["final_loss"] < 10
        assert by_method["ddp"]["sent_bytes"] > 3 * 4e6 / 2


@pytest.mark.slow
def test_ranks_that_hold_a_replica_together_are_measured(tmp_path: Path) -> None:
    for _, *found in records(tmp_path, SHARDED, model="small_mlp", local_size=2):
        assert [each["method"] for each in found] == list(SHARDED)
        losses = [each["final_loss"] for each in found]
        assert losses[1:] == pytest.approx([losses[0]] * 5), "one group trains as fully_shard does"


PREDICTED: dict[str, dict[str, Any]] = {
    "local": {},
    "ddp": {"bucket_cap_mb": 25},
    "fsdp": {},
    "gossip": {"topology": "one_peer_exponential", "compression": ["none", "int8"]},
    "diloco": {"method": "gossip", "topology": "complete", "algorithm": {"name": "diloco", "period": 4}},
}
UNPREDICTED: dict[str, dict[str, Any]] = {"hsdp": {}, "gossip": {"bucket_cap_mb": 5}, "ddp": {"hook": "bf16"}}


@pytest.mark.slow
def test_what_is_measured_is_also_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "_NODES", (2, 4))
    case = step_time_case(methods=PREDICTED, model="small_mlp", predicts=True)
    (result,), report = run(StepTime, case, tmp_path)
    assert [row.predicted_s > 0 for row in result.rows] == [True] * 6
    assert report.count("| gossip int8 | ") == 3  # of costs, of ratios, of predictions
    assert "7 billion parameters" in (tmp_path / "predicted.svg").read_text()


def test_predictions_are_of_links_and_computation() -> None:
    """Of 8 MB on links of 1 MB/s, over which all-reduce among four nodes sends 6 / 4 of them: 12 s."""
    workload = gossip.Workload(forward_s=0.1, backward_s=0.2, bucket_bytes=(4_000_000,) * 2)
    cluster = gossip.Cluster(num_nodes=4, latency_us=0.0, bandwidth_gbps=0.008)
    probe = Measured(cluster, workload, is_regular=True, coding_s={"int8": 0.5})
    found = {each.label: predicted_s(probe, each, 100) for each in expand(PREDICTED, 4)}
    expected = {"local": 0.3, "ddp": 12.2, "fsdp": 0.3 + 12 + 6 + 3, "gossip": 8.0, "gossip int8": 8 / 3.99 + 0.5}
    expected["diloco"] = 0.3 + 12 / 4
    assert found == pytest.approx(expected, rel=0.05)
    twice = scaled(probe, 2.0)
    assert {each.label: predicted_s(twice, each, 100) for each in expand(PREDICTED, 4)} == pytest.approx(
        {label: 2 * (each or 0.0) for label, each in found.items()}
    )
    assert [predicted_s(probe, each) for each in expand(UNPREDICTED, 4)] == [None] * 3


def final_parameters() -> torch.Tensor:
    workload = WORKLOADS["mlp"]
    module = workload.initial_module(0)
    method = bench_methods.METHODS["decent_dp"](
        module, bench_methods.sgd(0.01), {"topology": "one-peer-exp"}, timedelta(seconds=60)
    )
    for batch in workload.batches(0, dist.get_rank())[:3]:
        method.step(batch)
    method.close()
    with method.averaged():
        return module.layers[1].weight.detach()[:4].clone()


@pytest.mark.slow
def test_decent_dp_leaves_nothing_behind_and_trains() -> None:
    if not bench_methods.decent_dp_is_installed():
        pytest.skip("decent-dp is not installed: pip install '.[bench]'")
    first, second = gossip.launch(final_parameters, world_size=2, num_threads=1)
    assert first.equal(second)
    assert not first.allclose(WORKLOADS["mlp"].initial_module(0).layers[1].weight[:4])


def drawn(kind: str = "exponential", **changed: Any) -> float:
    place = {"seed": 0, "repetition": 0, "rank": 1, "step": 2} | changed
    return straggler_delay_s(kind, list(place.values()), 0.3)


def test_stragglers_exponential_is_the_same_every_time_and_another_elsewhere() -> None:
    assert drawn() == drawn()
    others = {drawn(**{key: 7}) for key in ("seed", "repetition", "rank", "step")}
    assert len(others | {drawn()}) == 5
    delays = np.array([drawn(rank=rank, step=step) for rank, step in itertools.product(range(4), range(500))])
    assert delays.min() > 0
    assert delays.mean() == pytest.approx(0.05, rel=0.1)
    assert delays.std() == pytest.approx(0.05, rel=0.15)


def test_stragglers_of_one_rank() -> None:
    assert [drawn("half_speed", rank=rank) for rank in range(3)] == [0.1, 0.05, 0.05]
    assert [drawn("one_slow", rank=rank) for rank in range(3)] == [0.3, 0.0, 0.0]
    assert drawn("none") == 0.0

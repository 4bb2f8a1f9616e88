"""Methods against their definitions, every option of the wrapper in a configuration, and traces of profile=true."""

import json
import math
import statistics
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from listening import logged
from ranks import run_ranks
from safetensors.torch import load_file
from torch.autograd.profiler import record_function

import gossip
from gossip.communication.world import World
from gossip.errors import ExchangeError
from gossip.lab.experiments.evaluation import cross_entropy
from gossip.lab.experiments.experiment_build import build
from gossip.lab.experiments.job import PRELOAD, run_job
from gossip.lab.experiments.records import read_jsonl
from gossip.lab.experiments.training import tracer, train
from gossip.lab.experiments.training_methods import AllReduceMethod, _say_what_is_ignored
from gossip.launching.launcher import launch

SMALL = ("training.epochs=1", "training.batch_size=60", "launch.world_size=3", "training.consensus_every_steps=0")
CLIPPED = "wrapper.clip_grad_norm=0.5"

Records = list[dict[str, Any]]


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    summaries = run_ranks(train, config, str(folder), world_size=config["launch"]["world_size"])
    assert [summary.pop("rank") for summary in summaries] == list(range(len(summaries)))
    assert all(summary == summaries[0] for summary in summaries)
    return dict(summaries[0])


def run_two(folder: Path, *overrides: str) -> tuple[dict[str, Any], Records]:
    """The summary and rank 1's records."""
    summary = run(composed(*SMALL, "launch.world_size=2", *overrides), folder)
    return summary, read_jsonl(folder / "rank1.jsonl")


def trained_alone(config: dict[str, Any], ranks: tuple[int, ...], norm: float = math.inf) -> dict[str, torch.Tensor]:
    """One model in this process on the joined batches of ``ranks``: what all-reduce and no exchange amount to."""
    experiment = build(config)
    torch.manual_seed(experiment.settings.seed)
    module = experiment.make_module()
    optimizer = experiment.make_optimizer(list(module.named_parameters()))
    shards, data = experiment.shards, experiment.data
    scheduler = experiment.make_scheduler(optimizer, shards.steps_per_epoch)
    for step in range(shards.steps_per_epoch):
        samples = shards.batch(ranks, step)
        inputs, targets = data.train_inputs[samples], data.train_targets[samples]
        optimizer.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), norm)
        optimizer.step()
        scheduler.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_ddp_trains_as_one_model_on_all_batches(tmp_path: Path, max_norm: float | None) -> None:
    config = composed(*SMALL, "method=ddp", f"wrapper.clip_grad_norm={max_norm or 'null'}")
    summary = run(config, tmp_path / "run")
    averaged = load_file(tmp_path / "run" / "model.safetensors")
    for name, expected in trained_alone(config, (0, 1, 2), max_norm or math.inf).items():
        torch.testing.assert_close(averaged[name], expected, rtol=1e-4, atol=1e-5)
    assert summary["consensus_distance_before"] == 0
    numel = sum(tensor.numel() for tensor in averaged.values())
    assert summary["bytes_sent_per_step"] == round(2 * 2 / 3 * 4 * numel)
    assert summary["exposed_wait_s"] > 0
    assert (summary["algorithm"], summary["overlapped_s"], summary["wait_by_peer_s"]) == (None, None, {})
    assert summary["clipping"] == ("0.5 (global)" if max_norm else None)
    for record in read_jsonl(tmp_path / "run" / "rank1.jsonl"):
        assert min(record[name] for name in ("forward_s", "backward_s", "update_s")) > 0
        assert ("gradient_norm" in record) == (max_norm is not None)


def test_local_trains_every_rank_alone(tmp_path: Path) -> None:
    config = composed(*SMALL, "method=local")
    summary = run(config, tmp_path / "run")
    averaged = load_file(tmp_path / "run" / "model.safetensors")
    alone = [trained_alone(config, (rank,)) for rank in range(3)]
    for name, tensor in averaged.items():
        expected = torch.stack([replica[name] for replica in alone]).mean(0)
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
    assert summary["consensus_distance_before"] > 0.1
    assert summary["consensus_distance_after"] == 0
    assert summary["bytes_sent_per_step"] == 0
    worst, mean, best = (summary[f"local_test_accuracy_{which}"] for which in ("worst", "mean", "best"))
    assert worst < mean < best


@pytest.mark.parametrize("method", ["gossip", "ddp"])
def test_methods_serve_one_rank(tmp_path: Path, method: str) -> None:
    alone = ("launch.world_size=1", "launch.num_threads=1")
    config = composed("training.epochs=1", *alone, f"method={method}", "model.hidden=[8]")
    summary = run_job(config, tmp_path / "run", ["some=override"])
    assert summary["local_test_accuracy_mean"] == summary["averaged_test_accuracy"]
    assert summary["consensus_distance_before"] == 0
    assert summary["bytes_sent_per_step"] == 0
    assert summary["overrides"] == ["some=override"]
    assert (tmp_path / "run" / "topology.svg").exists() == (method == "gossip")


def test_ddp_tells_a_failed_exchange_from_a_failed_model() -> None:
    method = AllReduceMethod.__new__(AllReduceMethod)
    method.world, method._step = World(timedelta(seconds=5)), 3
    with (
        pytest.raises(
            ExchangeError, match=r"^rank 0: step 3: the all-reduce failed: the connection to another rank is closed$"
        ),
        method._exchange("the all-reduce"),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as caught, method._exchange("the all-reduce"):
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, ExchangeError)


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Rank 1's records of a run without options."""
    return run_two(tmp_path_factory.mktemp("default") / "run")[1]


@pytest.mark.parametrize(
    ("overrides", "clipping"),
    [
        ((CLIPPED, "wrapper.clip=bucket", "wrapper.bucket_cap_mb=0.001"), "0.5 (bucket)"),
        (("wrapper.transport=debug",), None),
    ],
)
def test_options_run(tmp_path: Path, default: Records, overrides: tuple[str, ...], clipping: str | None) -> None:
    summary, records = run_two(tmp_path / "run", *overrides)
    assert summary["clipping"] == clipping
    assert losses(records)[-1] < losses(records)[0]
    assert (losses(records) == pytest.approx(losses(default), rel=1e-4)) == (clipping is None)


def test_options_step_after_backward_is_the_same_mathematics(tmp_path: Path, default: Records) -> None:
    inside = run_two(tmp_path / "inside", CLIPPED)
    after = run_two(tmp_path / "after", CLIPPED, "wrapper.step_in_backward=false")
    assert losses(after[1]) == pytest.approx(losses(inside[1]), rel=1e-5)
    assert after[0]["clipping"] == inside[0]["clipping"] == "0.5 (global)"
    assert max(record["gradient_norm"] for record in inside[1]) > 0.5  # as they were before clipping
    assert losses(inside[1]) != pytest.approx(losses(default), rel=1e-3)


def test_options_without_meaning_for_ddp_are_named_only_if_changed() -> None:
    changed = (
        "algorithm.gamma=0.5",
        "wrapper.clip=bucket",
        "wrapper.buffers=average",
        "wrapper.step_in_backward=false",
        "wrapper.transport=debug",
    )
    with logged("INFO") as texts:
        _say_what_is_ignored(build(composed("method=ddp", CLIPPED)))
        assert not texts
        _say_what_is_ignored(build(composed("method=ddp", *changed)))
    assert texts == [
        "without meaning for method=ddp, and ignored: algorithm AdaptWhileCommunicating(gamma=0.5), "
        "wrapper.clip=bucket, wrapper.buffers=average, wrapper.step_in_backward=false, wrapper.transport=debug"
    ]


def test_records_hold_all_that_a_step_costs(tmp_path: Path) -> None:
    summary, _ = run_two(tmp_path / "run", "wrapper.bucket_cap_mb=0.001", "topology=ring")
    by_rank = [read_jsonl(tmp_path / "run" / f"rank{rank}.jsonl") for rank in range(2)]
    names = {field.name for field in fields(gossip.StepStats)}
    for rank, records in enumerate(by_rank):
        for record in records:
            assert names <= record.keys()
            assert sum(record["bytes_by_peer"].values()) == record["bytes_sent"] > 0
            assert record["bytes_by_peer"].keys() == {str(1 - rank)}
            assert record["gradient_norm"] > 0
            assert (record["num_refused"], record["num_skipped"]) == (0, 0)
        assert records[0]["consensus_distance_estimate"] is None
        assert all(record["consensus_distance_estimate"] > 0 for record in records[1:])
    for name in ("exposed_wait_s", "overlapped_s", "forward_s", "backward_s", "update_s"):
        totals = [sum(record[name] for record in records) for records in by_rank]
        assert summary[name] == pytest.approx(statistics.fmean(totals)), name
        assert summary[name] > 0, name
    for peer in range(2):
        waits = sum(record["wait_by_peer_s"].get(str(peer), 0.0) for record in by_rank[1 - peer])
        assert summary["wait_by_peer_s"][str(peer)] == pytest.approx(waits)
    assert (summary["num_refused"], summary["num_skipped"]) == (0, 0)
    json.dumps(summary, allow_nan=False)


NUM_STEPS = 5
Events = list[dict[str, Any]]


def complete_events(path: Path) -> Events:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def named(events: Events, name: str) -> Events:
    return [event for event in events if event["name"] == name]


@pytest.mark.parametrize(
    ("method", "message", "ranges"),
    [
        ("gossip", "gloo:recv", ("gossip::wait", "gossip::mix", "gossip::update", "gossip::send")),
        ("ddp", "gloo:all_reduce", ()),
    ],
)
def test_traces_have_ranges_of_steps_and_messages_in_other_threads(
    tmp_path: Path, method: str, message: str, ranges: tuple[str, ...]
) -> None:
    config = composed("profile=true", "training.epochs=1", "launch.world_size=2", f"method={method}")
    launch(train, config, str(tmp_path), world_size=2, preload=PRELOAD)
    for rank in range(2):
        events = complete_events(tmp_path / f"rank{rank}.trace.json")
        for name in ("forward", "backward", *ranges):
            assert len(named(events, name)) == NUM_STEPS, name
        first, *_ = named(events, "forward")
        messages = named(events, message)
        assert len(messages) >= NUM_STEPS - 1  # the last may be on its way
        assert first["tid"] not in {each["tid"] for each in messages}


@pytest.mark.parametrize(
    ("total_steps", "ends_after", "window"),
    [(3, 3, range(3)), (7, 7, range(2, 7)), (20, 20, range(5, 10)), (9, 6, range(4, 6))],  # the last by an error
)
def test_tracing_clips_its_window_to_the_run(tmp_path: Path, total_steps: int, ends_after: int, window: range) -> None:
    with tracer(tmp_path / "rank0.trace.json", total_steps) as profiler:
        for step in range(ends_after):
            with record_function(f"step {step}"):
                torch.ones(1).add(1)
            profiler.step()
    names = {event["name"] for event in complete_events(tmp_path / "rank0.trace.json")}
    assert {name for name in names if name.startswith("step ")} == {f"step {step}" for step in window}

"""Every option of the wrapper that a configuration has: a run with it, and what the run leaves about it."""

from __future__ import annotations

import json
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from loguru import logger
from ranks import run_ranks

import gossip
from gossip.lab.experiments.experiment_build import build
from gossip.lab.experiments.records import read_jsonl
from gossip.lab.experiments.training import train
from gossip.lab.experiments.training_methods import _say_what_is_ignored

SMALL = (
    "training.epochs=1",
    "training.batch_size=80",
    "training.consensus_every_steps=0",
    "launch.world_size=2",
)
CLIPPED = "wrapper.clip_grad_norm=0.5"

Records = list[dict[str, Any]]


def run(folder: Path, *overrides: str) -> tuple[dict[str, Any], Records]:
    """The summary and rank 1's records."""
    folder.mkdir(parents=True)
    summaries = run_ranks(train, composed(*SMALL, *overrides), str(folder), world_size=2)
    return dict(summaries[0]), read_jsonl(folder / "rank1.jsonl")


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Rank 1's records of a run without options."""
    return run(tmp_path_factory.mktemp("default") / "run")[1]


@pytest.mark.xdist_group("run_options")
@pytest.mark.parametrize(
    ("overrides", "clipping"),
    [
        ((CLIPPED, "wrapper.clip=bucket", "wrapper.bucket_cap_mb=0.001"), "0.5 (bucket)"),
        (("wrapper.transport=debug",), None),
    ],
)
def test_options_run(tmp_path: Path, default: Records, overrides: tuple[str, ...], clipping: str | None) -> None:
    summary, records = run(tmp_path / "run", *overrides)
    assert summary["clipping"] == clipping
    assert losses(records)[-1] < losses(records)[0]
    is_same = "wrapper.transport=debug" in overrides
    assert (losses(records) == pytest.approx(losses(default), rel=1e-4)) == is_same


def test_options_step_after_backward_is_the_same_mathematics(tmp_path: Path, default: Records) -> None:
    inside = run(tmp_path / "inside", CLIPPED)
    after = run(tmp_path / "after", CLIPPED, "wrapper.step_in_backward=false")
    assert losses(after[1]) == pytest.approx(losses(inside[1]), rel=1e-5)
    assert after[0]["clipping"] == inside[0]["clipping"] == "0.5 (global)"
    assert max(record["gradient_norm"] for record in inside[1]) > 0.5  # as they were before clipping
    assert losses(inside[1]) != pytest.approx(losses(default), rel=1e-3)


def test_options_without_meaning_for_ddp_are_named_only_if_changed() -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message}")
    try:
        _say_what_is_ignored(build(composed("method=ddp", CLIPPED)))
        assert not lines
        changed = (
            "algorithm.gamma=0.5",
            "wrapper.clip=bucket",
            "wrapper.buffers=average",
            "wrapper.step_in_backward=false",
            "wrapper.transport=debug",
        )
        _say_what_is_ignored(build(composed("method=ddp", *changed)))
    finally:
        logger.remove(sink)
    assert lines == [
        "INFO without meaning for method=ddp, and ignored: algorithm AdaptWhileCommunicating(gamma=0.5), "
        "wrapper.clip=bucket, wrapper.buffers=average, wrapper.step_in_backward=false, wrapper.transport=debug\n"
    ]


def test_records_hold_all_that_a_step_costs(tmp_path: Path) -> None:
    summary, _ = run(tmp_path / "run", "wrapper.bucket_cap_mb=0.001", "topology=ring")
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

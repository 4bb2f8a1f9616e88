"""The traces of profile=true: which steps are in them, and where their messages lie."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from torch.autograd.profiler import record_function

from gossip.lab.experiments.job import PRELOAD
from gossip.lab.experiments.training import tracer, train
from gossip.launching.launcher import launch

NUM_STEPS = 5
Events = list[dict[str, Any]]


def complete_events(path: Path) -> Events:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def named(events: Events, name: str) -> Events:
    """In the order of time."""
    return sorted((event for event in events if event["name"] == name), key=lambda event: event["ts"])


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

"""The traces of profile=true: which steps are in them, and where their exchanges lie."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from faulty_models import TRUSTED
from torch.autograd.profiler import record_function

from gossip.lab.experiments.job import PRELOAD
from gossip.lab.experiments.tracing import BACKWARD, FORWARD, TracedExchange, Tracer
from gossip.lab.experiments.training import train
from gossip.launching.launcher import launch

WINDOW = range(5, 10)
LATE_STEP = 6
Events = list[dict[str, Any]]


def run(folder: Path, *overrides: str) -> list[Events]:
    """Train on two ranks; the complete events of each rank's trace."""
    folder.mkdir()
    config = composed("profile=true", "training.epochs=1", "launch.world_size=2", *overrides)
    launch(train, config, str(folder), world_size=2, preload=PRELOAD)
    assert {path.name for path in folder.glob("*.trace.json*")} == {"rank0.trace.json", "rank1.trace.json"}
    return [complete_events(folder / f"rank{rank}.trace.json") for rank in range(2)]


def complete_events(path: Path) -> Events:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def named(events: Events, name: str) -> Events:
    """In the order of time."""
    return sorted((event for event in events if event["name"] == name), key=lambda event: event["ts"])


def exchanges(events: Events, bucket: int = 0) -> Events:
    return named(events, f"exchange of bucket {bucket}")


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"])


def test_tracing_shows_an_exchange_beside_the_next_forward(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    model = ("model._target_=faulty_models.LateModel", TRUSTED)
    late = ("~model.hidden", f"+model.step={LATE_STEP}", f"+model.pipe={pipe}")
    traces = run(tmp_path / "run", *model, *late, "topology=one_peer_exponential")
    for events in traces:
        for name in (FORWARD, BACKWARD, "gossip::wait", "gossip::mix", "gossip::update", "gossip::send"):
            assert len(named(events, name)) == len(WINDOW), name
        assert [exchange["args"]["step"] for exchange in exchanges(events)] == list(WINDOW)
        for exchange, send in zip(exchanges(events), named(events, "gossip::send"), strict=True):
            assert send["ts"] <= exchange["ts"] <= send["ts"] + send["dur"]
            assert exchange["tid"] != send["tid"]
    # Rank 1 did not send before rank 0 was in its next forward pass.
    late = LATE_STEP - WINDOW[0]
    forward = named(traces[0], FORWARD)[late + 1]
    exchange = exchanges(traces[0])[late]
    assert exchange["ts"] < forward["ts"] < exchange["ts"] + exchange["dur"]
    assert overlap(exchange, forward)


def test_tracing_shows_the_all_reduce_of_ddp_inside_backward(tmp_path: Path) -> None:
    for events in run(tmp_path / "run", "method=ddp"):
        pairs = list(zip(exchanges(events), named(events, BACKWARD), strict=True))
        assert len(pairs) == len(WINDOW)
        for exchange, backward in pairs:
            assert exchange["args"]["bytes_sent"] > 0
            assert backward["ts"] <= exchange["ts"] < backward["ts"] + backward["dur"]


@pytest.mark.parametrize(("total_steps", "window"), [(3, range(3)), (7, range(2, 7)), (20, range(5, 10))])
def test_tracing_clips_its_window_to_the_run(tmp_path: Path, total_steps: int, window: range) -> None:
    tracer = Tracer(tmp_path / "rank0.trace.json", total_steps)
    for step in range(total_steps):
        with tracer.step(step), record_function(FORWARD), record_function(f"step {step}"):
            torch.ones(1).add(1)
    tracer.close()
    names = {event["name"] for event in complete_events(tmp_path / "rank0.trace.json")}
    assert {name for name in names if name.startswith("step ")} == {f"step {step}" for step in window}


def test_tracing_leaves_out_what_never_arrives(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "rank0.trace.json", 1)
    with tracer.step(0):
        with record_function(FORWARD):
            tracer.exchange_started(TracedExchange(0, 0, 8, 0.0, lambda: None))
            tracer.exchange_started(TracedExchange(0, 1, 8, 0.0, lambda: 1e-3))
        tracer.close()  # amid the step, as after an error
    events = complete_events(tmp_path / "rank0.trace.json")
    assert not exchanges(events, 0)
    (arrived,) = exchanges(events, 1)
    assert arrived["dur"] == pytest.approx(1e3)

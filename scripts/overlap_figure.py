"""Profile a real run of two workers and draw when compute and exchanges happen on rank 0.

    python scripts/overlap_figure.py docs/overlap.svg [topology]

A multilayer perceptron; every bar comes from torch.profiler's trace.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from gossip import GossipDataParallel, launch

NUM_STEPS = 3
WORLD_SIZE = 2
NUM_LAYERS = 8
WIDTH = 1280
BATCH_SIZE = 256
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#c6dbef",
    "mix + update + send": "#31a354",
    "exposed wait": "#de2d26",
    "exchange in flight": "#fd8d3c",
}
RANGES = {
    "forward": "forward",
    "backward": "backward",
    "gossip::mix": "mix + update + send",
    "gossip::update": "mix + update + send",
    "gossip::send": "mix + update + send",
    "gossip::wait": "exposed wait",
}


def train(topology: str) -> str | None:
    """Runs on every rank; rank 0 returns its trace as JSON text."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(NUM_LAYERS)]
    model = GossipDataParallel(nn.Sequential(*layers), partial(torch.optim.SGD, lr=0.01), topology, bucket_cap_mb=1.0)
    inputs = torch.randn(BATCH_SIZE, WIDTH)

    def make_step() -> None:
        with record_function("forward"):
            loss = model(inputs).square().mean()
        with record_function("backward"):
            loss.backward()

    for _ in range(3):
        make_step()
    everything = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiler:
        for _ in range(NUM_STEPS):
            make_step()
    model.close()
    if model.rank != 0:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_text()


def draw(trace: str, topology: str, path: Path) -> None:
    """Draw the trace's forward, backward and exchange events as bars over time."""
    events = [event for event in json.loads(trace)["traceEvents"] if event.get("ph") == "X"]
    begin = min(event["ts"] for event in events if event["name"] == "forward")
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots()

    def bar(event: dict[str, Any], lane: float, height: float, kind: str) -> None:
        start_ms, duration_ms = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
        axes.barh(lane, duration_ms, height, left=start_ms, color=COLOURS[kind], edgecolor="white", linewidth=0.3)

    for event in events:
        if event["name"] in RANGES:
            bar(event, 0, 0.8 if event["name"] in ("forward", "backward") else 0.5, RANGES[event["name"]])
    exchanges = sorted((e for e in events if e["name"].startswith("gloo:all_reduce")), key=lambda event: event["ts"])
    for number, event in enumerate(exchanges):
        bar(event, 0.75 + 0.2 * (number % NUM_LAYERS), 0.17, "exchange in flight")
    axes.set_yticks([0, 1.45], ["training\nthread", "gloo's\nthreads"])
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{NUM_STEPS} steps of rank 0 of {WORLD_SIZE}, {topology}, {NUM_LAYERS} buckets of 6.3 MiB over gloo",
        fontsize=10,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    handles = [axes.barh(0, 0, color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run and draw."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    topology = sys.argv[2] if len(sys.argv) == 3 else "one_peer_hypercube"
    trace = launch(train, topology, world_size=WORLD_SIZE)[0]
    draw(trace, topology, Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}")


if __name__ == "__main__":
    main()

"""When ranks compute and exchange, with gossip and with DDP on slow links: every bar comes from torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gossip.lab.benchmarks.bench_methods import MethodSpecification, sgd
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Links, Place, Record, Rows, RowsBenchmark, Write
from gossip.lab.experiments.run_figures import drawn
from gossip.private_torch import profile_all_threads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_STEPS = 3
_NUM_WARM_UP_STEPS = 4
_LEARNING_RATE = 0.01
_TOPOLOGY = "one_peer_hypercube"
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#c6dbef",
    "mix, update, send": "#31a354",
    "exposed wait": "#de2d26",
    "message of a bucket on its way": "#fd8d3c",
}
FORWARD, BACKWARD, UPDATE, WAIT, MESSAGE = COLOURS
_RANGES = {"forward": FORWARD, "backward": BACKWARD, "gossip::wait": WAIT}
_RANGES |= dict.fromkeys(("gossip::mix", "gossip::update", "gossip::send", "update"), UPDATE)
_MESSAGES = "gloo:recv", "gloo:all_reduce"  # a receive goes with a send, at the same time
_OPERATION = "autograd::engine::evaluate_function"  # each of the backward pass is in one of these


class OverlapSettings(BenchmarkSettings):
    """The settings of a run: a multilayer perceptron with a bucket per layer."""

    world_size: int = Field(2, ge=2, description="workers, each on a host of its own")
    network: Literal["loopback", "lab"] = "lab"
    links: Links = Field(("200mbit",), alias="rate", description="of every link, each way")
    num_layers: int = Field(8, ge=1, description="each a bucket")
    width: int = Field(360, ge=1, description="of each layer")
    batch_size: int = Field(3200, ge=1, description="per rank")

    @property
    def bucket_bytes(self) -> int:
        """The size of each layer."""
        return 4 * self.width**2

    def methods(self) -> list[MethodSpecification]:
        """Return gossip and DDP, with the same buckets."""
        options = {"bucket_cap_mb": self.bucket_bytes / 2**20}
        gossip = {"topology": _TOPOLOGY, **options}
        return [
            MethodSpecification(label=f"GossipDataParallel, {_TOPOLOGY}", kind="gossip", options=gossip),
            MethodSpecification(label="torch's DistributedDataParallel", kind="ddp", options=options),
        ]


class Bar(BaseModel):
    """An interval of a rank's time in milliseconds, from the first step that is drawn on; a key of the colours."""

    kind: str
    start_ms: float
    stop_ms: float


class Overlap(RowsBenchmark[OverlapSettings]):
    """The methods train in turns, and the last steps of each are traced."""

    settings = OverlapSettings
    title = "When rank 0 computes and exchanges"

    def work(self, case: OverlapSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        for method in case.methods():
            torch.manual_seed(0)
            layers = (nn.Linear(case.width, case.width, bias=False) for _ in range(case.num_layers))
            module = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))
            batch = torch.randn(case.batch_size, case.width), torch.randint(case.width, (case.batch_size,))
            running = method.start(module, sgd(_LEARNING_RATE), case.timeout_s)
            for _ in range(_NUM_WARM_UP_STEPS):
                running.step(batch)
            with profile(activities=[ProfilerActivity.CPU], experimental_config=profile_all_threads()) as profiler:
                for _ in range(1 + NUM_STEPS):  # the messages of the first are still on their way in the second
                    running.step(batch)
            dist.barrier()  # who is done first must not close its connections under the others
            running.close()
            write({"method": method.label, "trace": [bar.model_dump() for bar in bars_of(profiler)]})

    def cells(self, row: Record) -> list[str]:
        return [row["method"], f"{NUM_STEPS} steps in {_end_ms(row):.0f} ms"]

    def draw(self, settings: OverlapSettings, results: Sequence[Rows], folder: Path) -> None:
        """Draw the methods of the newest result below each other, over the same time."""
        rows, link = results[-1].rows, results[-1].link or settings.network
        with drawn(folder / f"overlap_{link}.svg", 9.5, 4.6) as figure:
            panels = figure.subplots(len(rows), 1, sharex=True)
            for axes, row in zip(panels, rows, strict=True):
                _draw_bars(axes, [Bar.model_validate(bar) for bar in row["trace"]])
                axes.set_title(": ".join(self.cells(row)))
            panels[0].set_xlim(0, 1.01 * max(map(_end_ms, rows)))
            panels[-1].set_xlabel("milliseconds")
            buckets = f"{settings.num_layers} buckets of {settings.bucket_bytes / 1e6:.2g} MB"
            figure.suptitle(f"Rank 0 of {settings.world_size}, links: {link}, {buckets} over gloo", fontsize=10)
            handles = [panels[0].barh(0, 0, color=colour, label=kind) for kind, colour in COLOURS.items()]
            figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)


def _end_ms(row: Record) -> float:
    """Return when the last step ended; messages may still be on their way."""
    return max(float(bar["stop_ms"]) for bar in row["trace"] if bar["kind"] != MESSAGE)


def bars_of(profiler: profile) -> list[Bar]:
    """Return the bars of a trace; what was under way when the first step began starts with it."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        content = json.loads(trace.read_text())
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    begin = sorted(event["ts"] for event in events if event["name"] == "forward")[1]

    def bar(event: dict[str, Any], kind: str) -> Bar:
        start = event["ts"] - begin
        return Bar(kind=kind, start_ms=max(0.0, start / 1e3), stop_ms=(start + event["dur"]) / 1e3)

    bars = [bar(event, _RANGES[event["name"]]) for event in events if event["name"] in _RANGES]
    bars += [bar(event, MESSAGE) for event in events if event["name"].startswith(_MESSAGES)]
    operations = [bar(event, BACKWARD).stop_ms for event in events if event["name"].startswith(_OPERATION)]
    if not any(event["name"].startswith("gossip::") for event in events):
        # After the last gradient DDP waits for what is in flight, and names no range for it.
        for backward in [each for each in bars if each.kind == BACKWARD]:
            computed = max(stop for stop in operations if stop <= backward.stop_ms)
            bars.append(Bar(kind=WAIT, start_ms=max(computed, backward.start_ms), stop_ms=backward.stop_ms))
    return sorted((each for each in bars if each.stop_ms > 0), key=lambda each: each.start_ms)


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    lanes: list[float] = []  # of exchanges: until when each is taken
    for each in bars:
        place, height, edge = 0.0, 0.5 if each.kind == UPDATE else 0.8, 0.0
        if each.kind == MESSAGE:
            lane = next((lane for lane, stop_ms in enumerate(lanes) if stop_ms <= each.start_ms), len(lanes))
            lanes[lane : lane + 1] = [each.stop_ms]
            place, height, edge = 0.7 + 0.24 * lane, 0.2, 0.5
        style: dict[str, Any] = {"color": COLOURS[each.kind], "edgecolor": "white", "linewidth": edge}
        style["zorder"] = list(COLOURS).index(each.kind)  # what is inside the backward pass lies on it
        axes.barh(place, each.stop_ms - each.start_ms, height, left=each.start_ms, **style)
    axes.set_yticks([0, 0.7 + 0.12 * (len(lanes) - 1)], ["training\nthread", "gloo's\nthreads"])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)

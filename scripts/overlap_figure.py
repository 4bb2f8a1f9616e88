"""Profile the same training with gossip and with DDP on a slow link, and draw when rank 0 computes and exchanges.

    sudo python scripts/overlap_figure.py docs/overlap.svg
    sudo python scripts/overlap_figure.py figure.svg --rate 100mbit --topology ring --world-size 4

Every worker is a host of its own behind a shaped link (network namespaces: Linux, root, iproute2). A multilayer
perceptron, a bucket per layer; every bar comes from torch.profiler's trace.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from gossip import GossipDataParallel
from gossip.lab.benchmarks.network.networks import Link
from gossip.lab.benchmarks.network.shaped_hosts import Lab, LabUnavailable
from gossip.private_torch import COMPILER

NUM_STEPS = 3
NUM_WARMUP_STEPS = 4
TIMEOUT_S = 120
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#c6dbef",
    "mix, update, send": "#31a354",
    "exposed wait": "#de2d26",
    "message of a bucket on its way": "#fd8d3c",
}
FORWARD, BACKWARD, UPDATE, WAIT, MESSAGE = COLOURS
RANGES = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "gossip::mix": UPDATE,
    "gossip::update": UPDATE,
    "gossip::send": UPDATE,
    "update": UPDATE,
    "gossip::wait": WAIT,
}
_MESSAGES = "gloo:recv", "gloo:all_reduce"  # a receive goes with a send, at the same time
_OPERATION = "autograd::engine::evaluate_function"  # each of the backward pass is in one of these


@dataclass(frozen=True)
class Training:
    """What all workers do."""

    world_size: int
    topology: str
    rate: str
    num_layers: int
    width: int
    batch_size: int

    @property
    def bucket_bytes(self) -> int:
        """Of each of the layers."""
        return 4 * self.width**2


@dataclass(frozen=True)
class Bar:
    """An interval of rank 0's time in milliseconds, from the first step that is drawn on."""

    kind: str
    start_ms: float
    stop_ms: float


def work(training: Training, rank: int, places: Any, interface: str, folder: str) -> None:
    """Runs on every host; rank 0 leaves a trace of each method in the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    client = dist.TCPStore(*places.get(), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=client, rank=rank, world_size=training.world_size, timeout=timeout)
    for name, method in (("gossip", gossip_step), ("ddp", ddp_step)):
        step, close = method(training)
        profiler = profiled(step)
        close()
        if rank == 0:
            profiler.export_chrome_trace(str(Path(folder) / f"{name}.json"))
    dist.barrier()  # who is done first must not close its connections under the others
    dist.destroy_process_group()


def make_module(training: Training) -> nn.Module:
    """The same on every rank and for each method."""
    torch.manual_seed(0)
    width = training.width
    layers = (nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(training.num_layers))
    return nn.Sequential(*layers)


def gossip_step(training: Training) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step, and what ends it."""
    optimizer = partial(torch.optim.SGD, lr=0.01)
    bucket_cap_mb = training.bucket_bytes / 2**20
    model = GossipDataParallel(make_module(training), optimizer, training.topology, bucket_cap_mb=bucket_cap_mb)
    inputs = torch.randn(training.batch_size, training.width)

    def step() -> None:
        with record_function("forward"):
            loss = model(inputs).square().mean()
        with record_function("backward"):
            loss.backward()

    return step, model.close


def ddp_step(training: Training) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step, and what ends it."""
    bucket_cap_mb = training.bucket_bytes / 2**20
    model = DistributedDataParallel(make_module(training), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(training.batch_size, training.width)

    def step() -> None:
        with record_function("forward"):
            loss = model(inputs).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("update"):
            optimizer.step()
            optimizer.zero_grad()

    return step, lambda: None


def profiled(step: Callable[[], None]) -> profile:
    """Return the trace of the steps that are drawn, and of the one before, whose messages are still on their way."""
    for _ in range(NUM_WARMUP_STEPS):
        step()
    everything = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiler:
        for _ in range(1 + NUM_STEPS):
            step()
    return profiler


def run(training: Training, folder: Path) -> None:
    """Run the workers, each on its host."""
    lab = Lab(training.world_size, Link.parse(training.rate))
    processes = []
    try:
        importlib.import_module(COMPILER)  # or the first optimizer of every worker would import it
        context = multiprocessing.get_context("fork")
        places = context.SimpleQueue()
        for rank in range(training.world_size):
            told = training, rank, places, lab.interface, str(folder)
            process = context.Process(target=work, args=told, daemon=True)
            with lab.entered(rank):
                process.start()
            processes.append(process)
        store = lab.start_store(timedelta(seconds=TIMEOUT_S))  # not before: it has threads, which a fork would not have
        for _ in processes:
            places.put((store.host, store.port))
        for process in processes:
            process.join(2 * TIMEOUT_S)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        if failed:
            raise RuntimeError(f"the workers of ranks {failed} failed or did not end")
    finally:
        for process in processes:
            process.kill()
        lab.close()


def bars_of(trace: Path) -> list[Bar]:
    """Return the bars of a trace; what was under way when the first step began starts with it."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    begin = sorted(event["ts"] for event in events if event["name"] == "forward")[1]

    def bar(event: dict[str, Any], kind: str) -> Bar:
        start = event["ts"] - begin
        return Bar(kind, max(0.0, start / 1e3), (start + event["dur"]) / 1e3)

    bars = [bar(event, RANGES[event["name"]]) for event in events if event["name"] in RANGES]
    bars += [bar(event, MESSAGE) for event in events if event["name"].startswith(_MESSAGES)]
    operations = [bar(event, BACKWARD).stop_ms for event in events if event["name"].startswith(_OPERATION)]
    if not any(each["name"].startswith("gossip::") for each in events):
        # After the last gradient DDP waits for what is in flight, and names no range for it.
        for backward in [each for each in bars if each.kind == BACKWARD]:
            computed = max(stop for stop in operations if stop <= backward.stop_ms)
            bars.append(Bar(WAIT, max(computed, backward.start_ms), backward.stop_ms))
    return sorted((each for each in bars if each.stop_ms > 0), key=lambda each: each.start_ms)


def draw(by_method: dict[str, list[Bar]], training: Training, path: Path) -> None:
    """Draw the methods below each other, over the same time."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(len(by_method), 1, sharex=True)
    for axes, (title, bars) in zip(panels, by_method.items(), strict=True):
        _draw_bars(axes, bars)
        axes.set_title(f"{title}: {NUM_STEPS} steps in {_end_ms(bars):.0f} ms", fontsize=10, loc="left")
    panels[0].set_xlim(0, 1.01 * max(map(_end_ms, by_method.values())))
    panels[-1].set_xlabel("milliseconds")
    figure.suptitle(
        f"Rank 0 of {training.world_size} behind links of {Link.parse(training.rate).bits_per_second / 1e6:g} Mbit/s, "
        f"{training.num_layers} buckets of {training.bucket_bytes / 1e6:.2g} MB over gloo",
        fontsize=10,
    )
    handles = [panels[0].barh(0, 0, color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    lanes: list[float] = []  # of exchanges: until when each is taken
    for each in bars:
        place, height, edge = 0.0, 0.5 if each.kind == UPDATE else 0.8, 0.0
        if each.kind == MESSAGE:
            lane = next((lane for lane, stop_ms in enumerate(lanes) if stop_ms <= each.start_ms), len(lanes))
            lanes[lane : lane + 1] = [each.stop_ms]
            place, height, edge = 0.7 + 0.24 * lane, 0.2, 0.5
        width, colour = each.stop_ms - each.start_ms, COLOURS[each.kind]
        order = list(COLOURS).index(each.kind)  # what is inside the backward pass lies on it
        axes.barh(
            place, width, height, left=each.start_ms, color=colour, edgecolor="white", linewidth=edge, zorder=order
        )
    axes.set_yticks([0, 0.7 + 0.12 * (len(lanes) - 1)], ["training\nthread", "gloo's\nthreads"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _end_ms(bars: Sequence[Bar]) -> float:
    """When the last step ended; messages may still be on their way."""
    return max(each.stop_ms for each in bars if each.kind != MESSAGE)


def main() -> int | str:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the figure, .svg or .png")
    parser.add_argument("--rate", default="200mbit", help="of every link, each way")
    parser.add_argument("--topology", default="one_peer_hypercube")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=360, help="of each layer")
    parser.add_argument("--batch-size", type=int, default=3200)
    arguments = parser.parse_args()
    if arguments.world_size < 2 or min(arguments.num_layers, arguments.width, arguments.batch_size) < 1:
        parser.error("--world-size must be at least 2, and --num-layers, --width and --batch-size at least 1")
    options = {name: value for name, value in vars(arguments).items() if name != "output"}
    training = Training(**options)
    try:
        Link.parse(training.rate)
        with tempfile.TemporaryDirectory() as folder:
            run(training, Path(folder))
            by_method = {
                f"GossipDataParallel, {training.topology}": bars_of(Path(folder) / "gossip.json"),
                "torch's DistributedDataParallel": bars_of(Path(folder) / "ddp.json"),
            }
    except (LabUnavailable, ValueError, RuntimeError) as error:
        return f"{Path(__file__).name}: {error}"
    draw(by_method, training, arguments.output)
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

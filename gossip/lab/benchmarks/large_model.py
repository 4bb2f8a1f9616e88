"""Ways to train a model of the size of GPT-2 small: whether they agree, how much memory and how long they take."""

import contextlib
import ctypes
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from pydantic import Field, PositiveInt
from torch import nn

import gossip
from gossip import GossipDataParallel, World
from gossip.lab.benchmarks.bench_methods import MethodSpecification
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Record, Records, Rows, Write, table
from gossip.lab.benchmarks.network.counters import PeakDeviceMemory, PeakMemory
from gossip.lab.benchmarks.workloads import Batch
from gossip.lab.experiments.datasets import stdlib_text
from gossip.lab.experiments.models import CharTransformer
from gossip.lab.experiments.run_settings import Device, backend_for, own_device
from gossip.lab.experiments.validated_models import OneOf

_ADAMW = partial(torch.optim.AdamW, lr=3e-4)
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of mallopt(3)
_NUM_MEMORY_STEPS = 4  # in which memory is measured, and not time
_REPLICA_SAMPLES = 2  # in a step


class Way(NamedTuple):
    """A way to train: a key of :data:`.bench_methods.METHODS` and its options.

    ``like`` names the way with whose losses those of this way are compared.
    """

    kind: str
    options: dict[str, Any]
    group_size: int = 1
    num_replicas: int = 2
    like: str | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_replicas * self.group_size


WAYS = {
    "ddp": Way("ddp", {"gradient_as_bucket_view": False}),
    "ddp, gradients as views": Way("ddp", {}, like="ddp"),
    "fully_shard": Way("fsdp", {}, like="ddp"),
    "exact": Way("gossip", {}),
    "exact, continue": Way("gossip", {"on_peer_loss": "continue"}, like="exact"),
    "int8": Way("gossip", {"compression": "int8"}, like="exact"),
    "int4": Way("gossip", {"compression": "int4"}, like="exact"),
    "shard=none": Way("gossip", {"shard": "whole"}, group_size=2, like="exact"),
    "shard=optimizer": Way("gossip", {"shard": "optimizer"}, group_size=2, like="exact"),
    "fully_shard, gossip": Way("gossip", {"shard": "fsdp"}, group_size=2, like="exact"),
    "fully_shard, int8": Way("gossip", {"shard": "fsdp", "compression": "int8"}, group_size=2, like="int8"),
    "ddp, 4 ranks": Way("ddp", {"gradient_as_bucket_view": False}, num_replicas=4),
    "4 replicas": Way("gossip", {}, num_replicas=4),
    "4 replicas, continue": Way("gossip", {"on_peer_loss": "continue"}, num_replicas=4, like="4 replicas"),
    "4 replicas, int8": Way("gossip", {"compression": "int8"}, num_replicas=4, like="4 replicas"),
    "4 replicas, int4": Way("gossip", {"compression": "int4"}, num_replicas=4, like="4 replicas"),
}


class LargeModelSettings(BenchmarkSettings):
    """The settings of a run; a case is one way."""

    world_size: int = 2
    timeout_s: float = 600.0
    ways: tuple[Annotated[str, OneOf(WAYS)], ...] = Field(tuple(WAYS), min_length=1, description="; ".join(WAYS))
    steps: int = Field(20, ge=_NUM_MEMORY_STEPS + 1, description="of each way")
    width: PositiveInt = Field(768, description="of the transformer")
    depth: PositiveInt = Field(12, description="its blocks")
    vocabulary: PositiveInt = Field(50257, description="rows of the embedding, which is the output layer too")
    tokens: PositiveInt = Field(32, description="of a sample; a replica takes two in a step")
    dtype: Literal["float32", "float64"] = Field("float32", description="of the parameters: float32, float64")
    device: Device = Field("cpu", description="cpu, or cuda, whose allocated memory is measured then")

    def cases(self) -> Iterator[tuple[str, Self]]:
        for name in self.ways:
            way = WAYS[name]
            update = {"ways": (name,), "world_size": way.num_ranks, "local_size": way.group_size}
            yield name.replace(", ", "_").replace(" ", "_"), self.model_copy(update=update)


class LargeModel(Benchmark[LargeModelSettings, Rows]):
    """Every way has processes of its own, the same initial values, and the same samples of each replica."""

    settings = LargeModelSettings
    title = "A model of real size"
    explanation = (
        "Loss: mean over the samples of a step. Apart: the largest relative difference of the losses of a step from "
        "those of the way that is named. Memory: resident, of the process as a whole, the most of all ranks, at rest "
        "after four steps and within them, where what torch frees is given back to the system at once, or the peak "
        "would be that of the allocator; then in the other steps and in a save after them, with the allocator as it "
        "is. Step: the median of the other steps. Background: for how long training stands when a checkpoint is begun "
        "in the background."
    )

    def launch_options(self, case: LargeModelSettings) -> dict[str, Any]:
        """Take NCCL where each rank has a GPU."""
        return {"backend": backend_for(case.world_size, case.device)}

    def work(self, case: LargeModelSettings, place: Place, write: Write) -> None:
        """Write the losses, bytes and seconds of this rank; a way that cannot be saved lacks what concerns that."""
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)  # what is freed is given back at once
        way, device = WAYS[case.ways[0]], own_device(case.device)
        memory = PeakMemory() if device.type == "cpu" else PeakDeviceMemory()
        found: Record = {}
        module, batches = _module(case).to(device), _batches(case, way, place.rank, device)
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        with _timed(found, "construct_s"):
            method = MethodSpecification(label=case.ways[0], kind=way.kind, options=way.options)
            running = method.start(module, _ADAMW, case.timeout_s)
        losses, step_s = [], []
        for number, batch in enumerate(itertools.islice(batches, case.steps)):
            if number == _NUM_MEMORY_STEPS:
                found |= {"rest_bytes": memory.before + memory.now(), "peak_bytes": memory.before + memory.bytes()}
                for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
                    ctypes.CDLL(None).mallopt(parameter, 2**25)  # as glibc sets them by itself
                memory.restart()
            began = time.perf_counter()
            losses.append(float(running.step(batch)))
            step_s.append(time.perf_counter() - began)
        step_s, first_step_s = step_s[_NUM_MEMORY_STEPS:], step_s[0]
        found |= {"losses": losses, "first_step_s": first_step_s, "step_s": statistics.median(step_s)}
        found["later_peak_bytes"] = memory.before + memory.bytes()
        if isinstance(running.model, GossipDataParallel):
            _end(running.model, memory, found)
        write(found | {"num_parameters": num_parameters})

    def result(self, case: LargeModelSettings, records: Records) -> Rows:
        """Return the means of the losses over all samples of a step, and otherwise the most of all ranks."""
        losses = [statistics.fmean(of_step) for of_step in zip(*(of[0]["losses"] for of in records), strict=True)]
        most = {key: max(of[0][key] for of in records) for key in records[0][0] if key != "losses"}
        return Rows(link=None, rows=[{"way": case.ways[0], "losses": losses, **most}])

    def facts(self, settings: LargeModelSettings) -> list[str]:
        return [
            f"A transformer of width {settings.width}, {settings.depth} blocks and {settings.vocabulary} tokens "
            f"({settings.dtype}), random initial values, characters of Python's standard library; AdamW, two samples "
            f"of {settings.tokens} tokens for each replica, {settings.steps} steps; `one_peer_exponential`."
        ]

    def sections(self, results: Sequence[Rows]) -> list[str]:
        by_way = {row["way"]: row for result in results for row in result.rows}
        memory = ["way", "ranks", "first loss", "last loss", "apart", "from", "at rest, GB", "peak, GB", "of ddp's"]
        times = ["way", "construction, s", "first step, s", "step, s", "averaged, s", "export, s", "save, s"]
        names = ("construct_s", "first_step_s", "step_s", "averaged_s", "export_s", "save_s", "background_s")
        timed = ([way, *(f"{row[name]:.2f}" if name in row else "" for name in names)] for way, row in by_way.items())
        return [
            table([*memory, "later steps, GB", "saving, GB"], (_memory_cells(row, by_way) for row in by_way.values())),
            table([*times, "background, s"], timed),
        ]


def _memory_cells(row: Record, by_way: dict[str, Record]) -> list[str]:
    way, of_ddp, apart = WAYS[row["way"]], "", ("", "")
    if (ddp := by_way.get("ddp")) is not None:
        of_ddp = f"{row['peak_bytes'] / ddp['peak_bytes']:.2f}"
    if (like := by_way.get(way.like or "")) is not None:
        pairs = zip(row["losses"], like["losses"], strict=True)
        apart = f"{max(abs(loss / other - 1) for loss, other in pairs):.1e}", like["way"]
    losses = [f"{row['losses'][place]:.4f}" for place in (0, -1)]
    sizes = (row.get(f"{name}_bytes") for name in ("rest", "peak", "later_peak", "save_peak"))
    rest, peak, later, saving = ("" if size is None else f"{size / 1e9:.2f}" for size in sizes)
    return [row["way"], str(way.num_ranks), *losses, *apart, rest, peak, of_ddp, later, saving]


def _module(case: LargeModelSettings) -> nn.Module:
    torch.manual_seed(0)
    heads = max(1, case.width // 64)
    module = CharTransformer(
        (case.tokens,), case.vocabulary, width=case.width, depth=case.depth, num_heads=heads, tied_head=True
    )
    return module.to(getattr(torch, case.dtype))


def _batches(case: LargeModelSettings, way: Way, rank: int, device: torch.device) -> Iterator[Batch]:
    """Yield the samples of this rank for each step; the ranks of a group divide those of their replica."""
    data = stdlib_text(context_length=case.tokens, max_bytes=200_000).to(device)
    num_samples = _REPLICA_SAMPLES // way.group_size
    for step in itertools.count():
        first = (step * way.num_ranks + rank) * num_samples
        samples = torch.arange(first, first + num_samples) % len(data.train_inputs)
        yield data.train_inputs[samples], data.train_targets[samples]


def _end(model: GossipDataParallel, memory: PeakMemory | PeakDeviceMemory, found: Record) -> None:
    """Save, average and export, and close the model. Collective."""
    with tempfile.TemporaryDirectory() as own:
        world = World(model.world.timeout)  # of all ranks, whatever those of a group share
        folder = Path(world.gather_bytes(own.encode(), "naming a folder")[0].decode())
        world.close()
        memory.restart()
        with _timed(found, "save_s"):
            gossip.save(model, folder / "checkpoints")
        found["save_peak_bytes"] = memory.before + memory.bytes()
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        with _timed(found, "averaged_s"), model.averaged():
            pass
        with _timed(found, "export_s"):
            gossip.export(model, folder / "model.safetensors")
        (folder / "model.safetensors").unlink(missing_ok=True)
        with _timed(found, "background_s"):
            gossip.save(model, folder / "background", background=True)
        model.close()
        dist.barrier()


@contextlib.contextmanager
def _timed(found: Record, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    found[name] = time.perf_counter() - began

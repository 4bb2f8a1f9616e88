"""What the wrapper costs against plain PyTorch: time of a step, memory of the update, and ``max_difference``."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, Field, PositiveFloat
from torch import nn
from torch.optim import Optimizer

import gossip
from gossip import GossipDataParallel
from gossip.compression.part_memory import staging_bytes
from gossip.exchange.outlier_detection import SAMPLE_NUMEL
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Record, Records, Write
from gossip.lab.benchmarks.summaries import table
from gossip.lab.experiments.models import CharTransformer
from gossip.lab.experiments.validated_models import OneOf
from gossip.private_torch import TorchDispatchMode, tree_leaves

Step = Callable[[], None]
Optimize = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]

OPTIMIZERS: dict[str, Optimize] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "fused_adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
}
NUM_WARM_UP_STEPS = 3
_GRADIENT = attrgetter("grad")


class Mode(NamedTuple):
    """One way to train: the wrapper's keyword arguments, None for plain PyTorch, and what the loop calls itself.

    That are ``optimizer.step()`` and ``zero_grad()``, and before them ``clip_grad_norm_`` unless the norm is None.
    """

    options: dict[str, Any] | None
    calls_step: bool = False
    clip_norm: float | None = None


PLAIN, CLIPPED = Mode(None, calls_step=True), Mode(None, calls_step=True, clip_norm=1.0)
MODES = {
    "control": (PLAIN, PLAIN),
    "fused": (PLAIN, Mode({})),
    "fused, clip bucket": (CLIPPED, Mode({"clip_grad_norm": 1.0, "clip": "bucket"})),
    "fused, clip global": (CLIPPED, Mode({"clip_grad_norm": 1.0})),
    "outside backward": (PLAIN, Mode({"step_in_backward": False}, calls_step=True)),
}
"""What plain PyTorch does to the same effect, and the way that is measured against it."""


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """10 million parameters in 100 tensors, and the 128 characters of each step."""
    return CharTransformer((64,), 96, width=320, depth=8), torch.randint(96, (2, 64))


def small_tensors() -> tuple[nn.Module, torch.Tensor]:
    """500 tensors of 64 or 8 elements, where nothing but the cost per tensor counts."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(250)]), torch.randn(8, 8)


def transformer_100m() -> tuple[nn.Module, torch.Tensor]:
    """99 million parameters, and the 2,048 characters of each step."""
    return CharTransformer((256,), 96, width=768, depth=14), torch.randint(96, (8, 256))


MODELS = {"transformer": transformer, "small_tensors": small_tensors, "transformer_100m": transformer_100m}


class OverheadSettings(BenchmarkSettings):
    """The settings of a run; a case is the time, ``max_difference``, or the memory of one model in one mode."""

    world_size: int = 1
    timeout_s: PositiveFloat = 300.0
    steps: int = Field(60, ge=2, description="pairs of steps per model and mode")
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = Field("adamw", description=", ".join(OPTIMIZERS))
    models: tuple[Annotated[str, OneOf(MODELS)], ...] = Field(
        ("transformer", "small_tensors"), min_length=1, description=", ".join(MODELS)
    )
    modes: tuple[Annotated[str, OneOf(MODES)], ...] = Field(tuple(MODES), min_length=1, description="; ".join(MODES))
    device: str = Field("cpu", description="where the time is measured; all else only on the cpu")
    bucket_cap_mb: PositiveFloat = Field(25.0, description="of the wrapper, for the memory")
    differences: bool = Field(False, description="measure what max_difference costs, too")
    output: str | None = Field(None, description="a file for the numbers as JSON")

    part: Literal["time", "differences", "memory_bytes"] = "time"
    """Of a case."""

    def cases(self) -> Iterator[tuple[str, Self]]:
        """Yield the parts; for the memory, each model and mode has processes of its own."""
        yield "time", self
        if torch.device(self.device).type == "cpu":
            if self.differences:
                yield "differences", self.model_copy(update={"part": "differences", "world_size": 4})
            for model, mode in itertools.product(self.models, self.modes):
                update = {"part": "memory_bytes", "world_size": 2, "models": (model,), "modes": (mode,)}
                yield f"memory/{model}/{mode}", self.model_copy(update=update)


class OverheadResult(BaseModel):
    """The rows of a part: of the times ratios of paired steps and milliseconds, of the memory bytes."""

    part: str
    rows: list[Record]


class Overhead(Benchmark[OverheadSettings, OverheadResult]):
    """Two replicas of one model train in turns in every rank; then the bytes of the update are counted on rank 0."""

    settings = OverheadSettings
    title = "What the wrapper costs"

    def work(self, case: OverheadSettings, place: Place, write: Write) -> None:
        """Write a row for every model and mode."""
        make = partial(Training, optimize=OPTIMIZERS[case.optimizer], device=torch.device(case.device))
        if case.part == "differences":
            for model, choice in itertools.product(case.models, (None, "warn", "clip")):
                ways = (Mode({"topology": "ring", "max_difference": each}) for each in (None, choice))
                found = measure_pairs(*(make(model, way) for way in ways), num_steps=case.steps)
                write({"model": model, "mode": f"max_difference={choice}", **found})
            return
        for model, mode in itertools.product(case.models, case.modes):
            plain, other = MODES[mode]
            if case.part == "time":
                found = measure_pairs(make(model, plain), make(model, other), num_steps=case.steps)
            else:
                found = measure_memory(make(model, other, bucket_cap_mb=case.bucket_cap_mb), counts=place.rank == 0)
            write({"model": model, "mode": mode, **found})

    def result(self, case: OverheadSettings, records: Records) -> OverheadResult:
        """Return the rows of rank 0."""
        return OverheadResult(part=case.part, rows=[dict(record) for record in records[0]])

    def facts(self, settings: OverheadSettings) -> list[str]:
        """Tell optimizer, device and sizes."""
        return [
            f"{settings.optimizer}, {settings.steps} pairs of steps on {settings.device}; memory on the cpu at world "
            f"size 2, buckets of {settings.bucket_cap_mb:g} MiB. `control` is plain PyTorch."
        ]

    def sections(self, results: Sequence[OverheadResult]) -> list[str]:
        """Return a table of each part."""
        tables: dict[str, Callable[[list[Record]], str]] = {
            "Time of a step": time_table,
            "Time of a step on a ring of 4 ranks": partial(time_table, plain="without"),
            "Memory in MiB": memory_table,
        }
        parts = zip(tables.items(), _by_part(results).values(), strict=True)
        return [text for (title, make), rows in parts if rows for text in (f"## {title}", make(rows))]

    def draw(self, settings: OverheadSettings, results: Sequence[OverheadResult], folder: Path) -> None:  # noqa: ARG002
        """Write the file that is asked for."""
        if settings.output is not None:
            Path(settings.output).write_text(json.dumps(_by_part(results), indent=2) + "\n", encoding="utf-8")


def _by_part(results: Sequence[OverheadResult]) -> dict[str, list[Record]]:
    parts = ("time", "differences", "memory_bytes")
    return {part: [row for result in results if result.part == part for row in result.rows] for part in parts}


class Training:
    """A loop's body: forward, backward and update, plain or with the wrapper, which takes further options."""

    def __init__(self, model_name: str, mode: Mode, optimize: Optimize, device: torch.device, **options: Any) -> None:
        torch.manual_seed(0)
        module, inputs = MODELS[model_name]()
        self.module, self._inputs, self._mode = module.to(device), inputs.to(device), mode
        if mode.options is None:
            self.model, self.optimizer = self.module, optimize(list(self.module.named_parameters()))
        else:
            self.model = GossipDataParallel(self.module, optimize, **mode.options, **options)
            self.optimizer = self.model.optimizer

    def __call__(self) -> None:
        """Make one step, and wait until the device has made it."""
        self.model(self._inputs).square().mean().backward()
        if self._mode.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._mode.clip_norm)
        if self._mode.calls_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self._inputs.is_cuda:
            torch.cuda.synchronize()


def measure_pairs(plain: Step, other: Step, *, num_steps: int) -> Record:
    """Make both steps in turns: the ratio's quartiles and the medians of both sides."""
    pairs = []
    for number in range(NUM_WARM_UP_STEPS + num_steps):
        order = (other, plain) if number % 2 else (plain, other)
        took = {}
        for step in order:
            start = time.perf_counter()
            step()
            took[step] = time.perf_counter() - start
        pairs.append((took[plain], took[other]))
    del pairs[:NUM_WARM_UP_STEPS]
    lower, median, upper = statistics.quantiles([other / plain for plain, other in pairs], n=4, method="inclusive")
    return {
        "ratio": median,
        "ratio_lower_quartile": lower,
        "ratio_upper_quartile": upper,
        "plain_ms": 1e3 * statistics.median(plain for plain, _ in pairs),
        "mode_ms": 1e3 * statistics.median(other for _, other in pairs),
    }


class LiveBytes(TorchDispatchMode):
    """Finds the operation at which the tensors of the update take most.

    Counted are the storages that it is told to follow, those that gossip's or torch.optim's code allocates without
    grad mode while it is active, and the gradients.

    ``now`` are the bytes of what is followed. ``peak`` is the worst since ``looks`` was set: the bytes of all, those of
    the gradients, and the indices of the parameters that had one.
    """

    _folders = tuple(str(Path(module.__file__ or "").parent) for module in (gossip, torch.optim))

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looks = False
        self.peak: tuple[int, int, list[int]] = (0, 0, [])
        self._parameters = list(parameters)
        self._within_blocks = {parameter.untyped_storage()._cdata for parameter in self._parameters}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbers: list[int] = []  # the gradients at the newest look,
        self._sizes: dict[int, int] = {}  # and their storages
        self.now = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() and self._called_by_update():
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._within_blocks:
                    self.follow(tensor)
        if self.looks:
            self._look()
        return result

    def _look(self) -> None:
        gradients = list(map(_GRADIENT, self._parameters))
        numbers = list(map(id, gradients))
        if numbers != self._numbers:  # a gradient's object is the same for as long as there is that gradient
            self._numbers = numbers
            storages = [gradient.untyped_storage() for gradient in gradients if gradient is not None]
            self._sizes = {storage._cdata: storage.nbytes() for storage in storages}
        total = self.now + sum([size for key, size in self._sizes.items() if key not in self._alive])
        if total > self.peak[0]:
            indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
            self.peak = total, sum(self._sizes.values()), indices

    def follow(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:

            def freed(_: object) -> None:
                del self._alive[key]
                self.now -= size

            self._alive[key] = weakref.ref(storage, freed)
            self.now += size

    def _called_by_update(self) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != __file__:
            if frame.f_code.co_filename.startswith(self._folders):
                return True
            frame = frame.f_back
        return False


def measure_memory(step: Training, *, counts: bool) -> Record:
    """Return the bytes at the worst moment, by kind, and the bound; a peer that does not count only takes part."""
    parameters, num_messages, sample_bytes = list(step.module.parameters()), 0, 0
    if isinstance(step.model, GossipDataParallel):
        num_messages = 2
        buckets = [list(bucket.parameters) for bucket in step.model._buckets]
        followed = [bucket.block for bucket in step.model._buckets]
        sample_bytes = sum(block[:: -(-block.numel() // SAMPLE_NUMEL)].numel() * block.itemsize for block in followed)
    else:
        buckets, followed = [parameters], [parameter.data for parameter in parameters]
    all_bytes = sum(parameter.nbytes for parameter in parameters)

    meter = LiveBytes(parameters)
    for tensor in followed:
        meter.follow(tensor)
    with meter if counts else contextlib.nullcontext():
        step()  # makes the optimizer's state and the transport's buffers
        meter.looks = True
        step()
    state = sum(each.nbytes for each in tree_leaves(dict(step.optimizer.state)) if isinstance(each, torch.Tensor))
    kept = staging_bytes() + sample_bytes  # the former for the mixing of one part, whatever the size of the model
    messages = meter.now - all_bytes - state - kept  # what outlives a step
    if isinstance(step.model, GossipDataParallel):
        step.model.close()
    total, gradients, indices = meter.peak
    had_gradient = {id(parameters[index]) for index in indices}
    live = [parameter for bucket in buckets if not had_gradient.isdisjoint(map(id, bucket)) for parameter in bucket]
    return {
        "parameters": all_bytes,
        "gradients": gradients,
        "state": state,
        "messages": messages,
        "total": total,
        "bound": (1 + num_messages) * all_bytes + sum(parameter.nbytes for parameter in live) + state + kept,
    }


def time_table(results: list[Record], plain: str = "plain") -> str:
    """Markdown."""
    titles = ["model", "mode", f"median ratio to {plain}", "quartiles", f"{plain}, ms", "mode, ms"]
    rows = []
    for row in results:
        quartiles = f"{row['ratio_lower_quartile']:.3f} to {row['ratio_upper_quartile']:.3f}"
        times = [f"{row[key]:.2f}" for key in ("plain_ms", "mode_ms")]
        rows.append([row["model"], row["mode"], f"{row['ratio']:.3f}", quartiles, *times])
    return table(titles, rows)


def memory_table(results: list[Record]) -> str:
    """Markdown, in MiB."""
    kinds = ["parameters", "gradients", "optimizer state", "messages", "scratch", "sum", "bound"]
    rows = []
    for row in results:
        parts = [row[key] for key in ("parameters", "gradients", "state", "messages")]
        sizes = [*parts, row["total"] - sum(parts), row["total"], row["bound"]]
        cells = [f"{size / 2**20:.2f}" for size in sizes]
        rows.append([row["model"], row["mode"], *cells, f"{row['total'] / row['bound']:.3f}"])
    return table(["model", "mode", *kinds, "sum / bound"], rows)

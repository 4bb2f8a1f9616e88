"""What the wrapper costs against plain PyTorch: time at world size 1, memory at world size 2; and ``max_difference=``.

    python scripts/overhead.py --steps 60 --optimizer adamw
    python scripts/overhead.py --models small_tensors --modes fused --output overhead.json
    python scripts/overhead.py --device cuda --models transformer_100m --modes control fused --optimizer fused_adamw

Time: two replicas of one model make the same steps in one thread of one process, one plain (forward, backward,
``optimizer.step()``, ``zero_grad()``) and one wrapped, in turns, the first of a pair being the second of the next. The
table shows the median and the quartiles of the ratio within a pair; the row ``control`` is plain against plain.

The cost of ``max_difference``: four ranks on a ring, each with one model without and one with it, in turns likewise,
where every step waits for its messages; the row ``None`` is without against without.

Memory: in processes of their own, the most bytes that parameters, gradients, optimizer state, messages and the update's
scratch take together at any operation of the second step; not activations, and not what gloo keeps for itself. The
bound is parameters + gradients of the buckets that had any at that moment + optimizer state + two messages per bucket
+ the scratch for mixing one part, which does not grow with the model, + a sample of at most 2 KiB of each bucket, with
which the next message is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gossip
from gossip import GossipDataParallel, launch
from gossip.compression.part_memory import staging_bytes
from gossip.exchange.outlier_detection import SAMPLE_NUMEL
from gossip.lab.benchmarks.summaries import table
from gossip.lab.experiments.models import CharTransformer

Step = Callable[[], None]
Optimize = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]

OPTIMIZERS: dict[str, Optimize] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "fused_adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
}
NUM_WARM_UP_STEPS = 3
CONTROL = "control"
_GRADIENT = attrgetter("grad")


@dataclass(frozen=True)
class Mode:
    """One way to use the wrapper, and what plain PyTorch does to the same effect.

    ``options`` are the wrapper's keyword arguments; ``calls_step`` says whether its loop calls ``optimizer.step()`` and
    ``zero_grad()``; the plain loop calls ``clip_grad_norm_`` with ``plain_clip_norm`` unless that is None.
    """

    options: dict[str, Any] = field(default_factory=dict)
    calls_step: bool = False
    plain_clip_norm: float | None = None


MODES = {
    "fused": Mode(),
    "fused, clip bucket": Mode({"clip_grad_norm": 1.0, "clip": "bucket"}, plain_clip_norm=1.0),
    "fused, clip global": Mode({"clip_grad_norm": 1.0}, plain_clip_norm=1.0),
    "outside backward": Mode({"step_in_backward": False}, calls_step=True),
}


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
SMALL_MODELS = ("transformer", "small_tensors")


class Training:
    """A loop's body: forward, backward and update, plain or with the wrapper, which takes further options."""

    def __init__(
        self,
        model_name: str,
        optimize: Optimize,
        mode: Mode,
        *,
        is_plain: bool,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        module, inputs = MODELS[model_name]()
        self.module, self._inputs = module.to(device), inputs.to(device)
        if is_plain:
            self.model, self.optimizer = self.module, optimize(list(self.module.named_parameters()))
        else:
            self.model = GossipDataParallel(self.module, optimize, **mode.options, **options)
            self.optimizer = self.model.optimizer
        self._calls_step, self._clip_norm = is_plain or mode.calls_step, mode.plain_clip_norm if is_plain else None

    def __call__(self) -> None:
        """Make one step."""
        self.model(self._inputs).square().mean().backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        if self._calls_step:
            self.optimizer.step()
            self.optimizer.zero_grad()


def measure_time(
    model_name: str, mode_name: str, optimize: Optimize, num_steps: int, device: torch.device
) -> dict[str, Any]:
    """Paired steps, in turns: the ratio's quartiles and the medians of both sides."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    plain, other = (
        Training(model_name, optimize, MODES.get(mode_name, Mode()), is_plain=is_plain, device=device)
        for is_plain in (True, mode_name == CONTROL)
    )
    return {"model": model_name, "mode": mode_name, **measure_pairs(plain, other, num_steps, synchronize)}


def measure_pairs(plain: Step, other: Step, num_steps: int, synchronize: Step = lambda: None) -> dict[str, float]:
    """Make both steps in turns: the ratio's quartiles and the medians of both sides."""
    pairs = []
    for number in range(NUM_WARM_UP_STEPS + num_steps):
        order = (other, plain) if number % 2 else (plain, other)
        took = {}
        for step in order:
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
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


def measure_differences(model_name: str, choice: str | None, optimizer_name: str, num_steps: int) -> dict[str, Any]:
    """Runs on every rank: steps without and with ``max_difference``, in turns."""
    logger.remove()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"is_plain": False, "topology": "ring"}
    without, other = (
        Training(model_name, OPTIMIZERS[optimizer_name], Mode(), max_difference=each, **options)
        for each in (None, choice)
    )
    return {"model": model_name, "mode": f"max_difference={choice}", **measure_pairs(without, other, num_steps)}


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


def measure_memory(model_name: str, mode_name: str, optimizer_name: str, bucket_cap_mb: float) -> dict[str, Any]:
    """Runs on every rank: on rank 0 the bytes at the worst moment, by kind, and the bound."""
    logger.remove()
    is_plain, mode = mode_name == CONTROL, MODES.get(mode_name, Mode())
    step = Training(model_name, OPTIMIZERS[optimizer_name], mode, is_plain=is_plain, bucket_cap_mb=bucket_cap_mb)
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
    with contextlib.nullcontext() if dist.get_rank() else meter:  # a peer only has to take part
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
        "model": model_name,
        "mode": mode_name,
        "parameters": all_bytes,
        "gradients": gradients,
        "state": state,
        "messages": messages,
        "total": total,
        "bound": (1 + num_messages) * all_bytes + sum(parameter.nbytes for parameter in live) + state + kept,
    }


def time_table(results: list[dict[str, Any]], plain: str = "plain") -> str:
    """Markdown."""
    titles = ["model", "mode", f"median ratio to {plain}", "quartiles", f"{plain}, ms", "mode, ms"]
    rows = []
    for row in results:
        quartiles = f"{row['ratio_lower_quartile']:.3f} to {row['ratio_upper_quartile']:.3f}"
        times = [f"{row[key]:.2f}" for key in ("plain_ms", "mode_ms")]
        rows.append([row["model"], row["mode"], f"{row['ratio']:.3f}", quartiles, *times])
    return table(titles, rows)


def memory_table(results: list[dict[str, Any]]) -> str:
    """Markdown, in MiB."""
    kinds = ["parameters", "gradients", "optimizer state", "messages", "scratch", "sum", "bound"]
    rows = []
    for row in results:
        parts = [row[key] for key in ("parameters", "gradients", "state", "messages")]
        sizes = [*parts, row["total"] - sum(parts), row["total"], row["bound"]]
        cells = [f"{size / 2**20:.2f}" for size in sizes]
        rows.append([row["model"], row["mode"], *cells, f"{row['total'] / row['bound']:.3f}"])
    return table(["model", "mode", *kinds, "sum / bound"], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps per model and mode")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL_MODELS))
    parser.add_argument("--modes", nargs="+", choices=[CONTROL, *MODES], default=[CONTROL, *MODES])
    parser.add_argument("--device", default="cpu", help="where the time is measured; memory only on the cpu")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="of the wrapper, for the memory")
    parser.add_argument("--differences", action="store_true", help="measure what max_difference costs, too")
    parser.add_argument("--output", type=Path, help="a file for the numbers as JSON")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2, got {arguments.steps}")
    logger.remove()
    torch.set_num_threads(1)
    cases = [(model, mode) for model in arguments.models for mode in arguments.modes]
    device = torch.device(arguments.device)
    times = [measure_time(*case, OPTIMIZERS[arguments.optimizer], arguments.steps, device) for case in cases]
    print(f"Time of a step on {device}, {arguments.optimizer}, {arguments.steps} pairs, torch {torch.__version__}:\n")
    print(time_table(times), flush=True)
    differences = []
    if device.type != "cpu":
        cases = []
    elif arguments.differences:
        choices = [(model, choice) for model in arguments.models for choice in (None, "warn", "clip")]
        differences = [
            launch(measure_differences, *case, arguments.optimizer, arguments.steps, world_size=4)[0]
            for case in choices
        ]
        print(f"\nTime of a step on a ring of 4 ranks, {arguments.optimizer}:\n")
        print(time_table(differences, "without"), flush=True)
    memory = [
        launch(measure_memory, *case, arguments.optimizer, arguments.bucket_cap_mb, world_size=2)[0] for case in cases
    ]
    if memory:
        print(
            f"\nMemory in MiB, world size 2, buckets of {arguments.bucket_cap_mb:g} MiB; {CONTROL} is plain PyTorch:\n"
        )
        print(memory_table(memory))
    if arguments.output is not None:
        arguments.output.write_text(
            json.dumps({"time": times, "differences": differences, "memory_bytes": memory}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()

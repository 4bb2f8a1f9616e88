"""What the wrapper costs against plain PyTorch: the time of a step."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import nn
from torch.optim import Optimizer

from gossip import GossipDataParallel
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, Record, RowsBenchmark, Spread, Write
from gossip.lab.experiments.models import CharTransformer
from gossip.lab.experiments.validated_models import OneOf

Step = Callable[[], None]
Optimize = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]

OPTIMIZERS: dict[str, Optimize] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "fused_adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
}
NUM_WARM_UP_STEPS = 3


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


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer": lambda: (CharTransformer((64,), 96, width=320, depth=8), torch.randint(96, (2, 64))),
    "small_tensors": lambda: (nn.Sequential(*[nn.Linear(8, 8) for _ in range(250)]), torch.randn(8, 8)),
    "transformer_100m": lambda: (CharTransformer((256,), 96, width=768, depth=14), torch.randint(96, (8, 256))),
}
"""Models, and the inputs of each step: 10 million parameters in 100 tensors; 500 tensors of 64 or 8 elements, where the
cost per tensor is all that counts; 99 million parameters."""


class OverheadSettings(BenchmarkSettings):
    """The settings of a run."""

    world_size: int = 1
    timeout_s: PositiveFloat = 300.0
    steps: int = Field(60, ge=2, description="pairs of steps per model and mode")
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = Field("adamw", description=", ".join(OPTIMIZERS))
    models: tuple[Annotated[str, OneOf(MODELS)], ...] = Field(
        ("transformer", "small_tensors"), min_length=1, description=", ".join(MODELS)
    )
    modes: tuple[Annotated[str, OneOf(MODES)], ...] = Field(tuple(MODES), min_length=1, description="; ".join(MODES))
    device: str = Field("cpu", description="where the time is measured")


class Overhead(RowsBenchmark[OverheadSettings]):
    """Two replicas of one model train in turns in every rank."""

    settings = OverheadSettings
    title = "What the wrapper costs"

    def work(self, case: OverheadSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Write the ratio of paired steps and the milliseconds for every model and mode."""
        make = partial(Training, optimize=OPTIMIZERS[case.optimizer], device=torch.device(case.device))
        for model, mode in itertools.product(case.models, case.modes):
            plain, other = MODES[mode]
            found = measure_pairs(make(model, plain), make(model, other), num_steps=case.steps)
            write({"model": model, "mode": mode, **found})

    def facts(self, settings: OverheadSettings) -> list[str]:
        pairs = f"{settings.optimizer}, {settings.steps} pairs of steps on {settings.device}"
        return [f"{pairs}. `control` is plain against plain."]


class Training:
    """A loop's body: forward, backward and update, plain or with the wrapper."""

    def __init__(self, model_name: str, mode: Mode, optimize: Optimize, device: torch.device) -> None:
        torch.manual_seed(0)
        module, inputs = MODELS[model_name]()
        self.module, self._inputs, self._mode = module.to(device), inputs.to(device), mode
        if mode.options is None:
            self.model, self.optimizer = self.module, optimize(list(self.module.named_parameters()))
        else:
            self.model = GossipDataParallel(self.module, optimize, **mode.options)
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
    """Make both steps in turns, and return the ratio's median and quartiles and the medians of both sides."""
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
    ratios = Spread.quartiles([other / plain for plain, other in pairs])
    return {
        "median ratio": ratios.median,
        "quartiles": f"{ratios.low:.3f} to {ratios.high:.3f}",
        "plain, ms": 1e3 * statistics.median(plain for plain, _ in pairs),
        "mode, ms": 1e3 * statistics.median(other for _, other in pairs),
    }

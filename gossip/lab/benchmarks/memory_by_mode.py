"""What a rank holds between steps, by mode, algorithm and compression: ``model.memory()``, in bytes per parameter."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import nn

from gossip import ALGORITHMS, Algorithm, Asynchronous, Choco, DistributedTransport, GossipDataParallel
from gossip.communication.json_gathering import all_gather_json
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, RowsBenchmark, Write
from gossip.lab.experiments.training_methods import grouped
from gossip.lab.experiments.validated_models import OneOf
from gossip.launching import DEFAULT_TIMEOUT

_NUM_STEPS = 8
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)
_OPTIMIZERS = (_ADAMW, partial(torch.optim.SGD, lr=1e-4, momentum=0.9), torch.optim.SGD)
_OPTIONS = {"period": 4, "parts": 2, "overlap": 2}  # of algorithms that have them: an exchange within the steps
_ELSEWHERE = ", other machines"
_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "`step_in_backward=False`": {"step_in_backward": False},
    '`on_peer_loss="continue"`': {"on_peer_loss": "continue"},
    '`shard="none"`, groups of 2': {"shard": "none"},
    '`shard="optimizer"`, groups of 2': {"shard": "optimizer"},
    "`fully_shard`, groups of 2": {"shard": "fsdp"},
    **{name: {"compression": name} for name in ("bf16", "int8", "int4")},
    **{name: {"compression": name, "topology": "ring"} for name in ("choco", "powergossip")},
    "choco, signs": {"compression": Choco(sparsifier="sign"), "topology": "ring"},
}
_ALIASES = ("adapt_while_communicating", "awc", "atc")  # of what other rows have
ROWS = (
    *_MODES,
    *(f"{name}{_ELSEWHERE}" for name in ("default", "bf16", "int8", "int4", "choco")),
    *(f"`{name}`" for name in ALGORITHMS.available() if name not in _ALIASES),
)


class MemoryUseSettings(BenchmarkSettings):
    """The settings of a run."""

    width: PositiveInt = Field(512, description="of a layer")
    depth: PositiveInt = Field(2, description="layers")
    rows: tuple[Annotated[str, OneOf(ROWS)], ...] = Field(
        ROWS, min_length=1, alias="cases", description="; ".join(ROWS)
    )


class MemoryUse(RowsBenchmark[MemoryUseSettings]):
    """Ranks train a multilayer perceptron, each row by the first optimizer that its algorithm takes."""

    settings = MemoryUseSettings
    title = "Bytes per parameter between steps"

    def work(self, case: MemoryUseSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Write what the rank that is to hold most has by purpose, in all, and what ranks hold after some steps."""
        num_parameters = case.depth * case.width * (case.width + 1)
        for row in case.rows:
            options = _options(row)
            module = nn.Sequential(*[nn.Linear(case.width, case.width) for _ in range(case.depth)])
            if (shard := options.pop("shard", None)) is not None:
                options |= grouped(module, 2, shard)
            with GossipDataParallel(module, bucket_cap_mb=5.0, **{"optimizer": _ADAMW, **options}) as model:
                memory = model.memory()
                for _ in range(_NUM_STEPS):
                    model(torch.ones(1, case.width)).sum().backward()
                    if options.get("step_in_backward") is False:
                        model.optimizer.step()
                predicted = {
                    purpose: (num_bytes or 0) / num_parameters for purpose, num_bytes in memory.in_training.items()
                }
                own = predicted, memory.num_spare_bytes / num_parameters, model.memory().num_bytes / num_parameters
                ranks = all_gather_json(own, "telling what is held", DEFAULT_TIMEOUT)
            most, spare, _ = max(ranks, key=lambda rank: sum(rank[0].values()))
            in_all, measured = sum(most.values()), [held for _, _, held in ranks]
            totals = {"in all": _bounds(in_all, in_all + spare), "measured": _bounds(min(measured), max(measured))}
            write({"row": row, "topology": model.topology.name, **most, **totals})


def _bounds(least: float, most: float) -> str:
    return " to ".join(dict.fromkeys((f"{least:.2f}", f"{most:.2f}")))


def _options(row: str) -> dict[str, Any]:
    """Return the wrapper's arguments for a row."""
    if row.endswith(_ELSEWHERE):
        transport = partial(DistributedTransport, shares_memory=False)
        return {**_options(row.removesuffix(_ELSEWHERE)), "transport": transport}
    if row in _MODES:
        return dict(_MODES[row])
    make = ALGORITHMS.get(row.strip("`"))
    algorithm = make(**{key: _OPTIONS[key] for key in inspect.signature(make).parameters.keys() & _OPTIONS})
    requires, options = algorithm.requires, {"algorithm": algorithm, "optimizer": _optimizer_for(algorithm)}
    if topology := "path" if requires.tree else "complete" if requires.exact else "ring" if requires.static else None:
        options["topology"] = topology
    return {**options, "on_peer_loss": "continue"} if isinstance(algorithm, Asynchronous) else options


def _optimizer_for(algorithm: Algorithm) -> Callable[..., torch.optim.Optimizer]:
    """Return the first optimizer that the algorithm takes."""
    for optimizer in _OPTIMIZERS:
        with contextlib.suppress(ValueError):
            algorithm.check_optimizers((optimizer(nn.Linear(1, 1).parameters()),))
            return optimizer
    raise AssertionError(f"{algorithm.describe()} takes plain SGD")

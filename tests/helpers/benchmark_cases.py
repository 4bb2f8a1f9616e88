"""Small cases of benchmarks, and places for their ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place
from gossip.lab.benchmarks.step_time import StepTimeSettings
from gossip.lab.experiments.validated_models import read


def step_time_case(**changes: Any) -> StepTimeSettings:
    """A case of two ranks on loopback."""
    content = {
        "world_size": 2,
        "network": "loopback",
        "rate": "200mbit",
        "threads": 1,
        "timeout_s": 60,
        "methods": {"local": {}},
        "model": "mlp",
        "straggler": "none",
        "repetitions": 1,
        "warmup_steps": 2,
        "steps": 3,
        "seed": 0,
    }
    return read(StepTimeSettings, {**content, **changes})


def place_of(rank: int, case: BenchmarkSettings, folder: Path, num_sharing: int | None = None) -> Place:
    """On loopback, which all ranks share, in a process group that there is."""
    return Place(
        rank=rank,
        store_address="",
        store_port=0,
        address="127.0.0.1",
        interface="lo",
        num_sharing=case.world_size if num_sharing is None else num_sharing,
        records=str(folder / f"rank{rank}.jsonl"),
    )

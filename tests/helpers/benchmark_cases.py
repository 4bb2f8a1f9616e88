"""A small case of a benchmark."""

from typing import Any

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
        "predicts": False,
    }
    return read(StepTimeSettings, {**content, **changes})

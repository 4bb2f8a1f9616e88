"""model.memory(): what a rank holds, by purpose."""

from __future__ import annotations

import functools
from typing import Any

import torch
from ranks import run_ranks
from torch import nn

from gossip import GossipDataParallel

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)


def measured(**options: Any) -> dict[str, float]:
    """What a rank holds after three steps, in bytes per parameter."""
    with GossipDataParallel(nn.Linear(400, 400), OPTIMIZER, "ring", **options) as model:
        for _ in range(3):
            model(torch.ones(2, 400)).square().sum().backward()
        memory = model.memory()
        assert str(memory).splitlines()[-1].split()[2] == f"{memory.num_bytes:,}"
        assert memory.num_parameters == 400 * 401
        return {purpose: round(size / memory.num_parameters, 1) for purpose, size in memory.bytes_of.items()}


def measure() -> None:
    plain = measured()
    shared = plain.pop("messages that others read on this machine")
    assert shared in (4.0, 8.0)  # a second one where the peer still read the first
    assert plain == {
        "parameters": 4.0,
        "buffers": 0.0,
        "gradients": 0.0,
        "state of the optimizer": 8.0,
        "state of the algorithm": 0.0,
        "messages as sent, and what arrived": 0.0,
    }
    assert measured(algorithm="gradient_tracking")["state of the algorithm"] == 8.0
    shared_memory, codecs = list(measured(compression="bf16").values())[-2:]
    assert shared_memory in (2.0, 4.0)
    assert codecs == 0.0
    held = measured(step_in_backward=False)
    assert held["gradients"] == 4.0


def test_memory_is_told_by_purpose() -> None:
    run_ranks(measure, world_size=2)

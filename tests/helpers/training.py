"""A small training over processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import nn

from gossip import Compression, GossipDataParallel

NUM_STEPS = 150


def losses_with(compressions: Sequence[Compression | None]) -> list[float]:
    """Of the mean over ranks, on data that no rank has seen, after training with each of them on a ring."""
    return [_train(compression) for compression in compressions]


def _batch(seed: int, numel: int, part: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees, of one ``part``, is of no use by itself: it must learn from the others."""
    teacher = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(numel, 24, generator=generator)
    if part is not None:
        inputs[:, : 6 * part] = 0
        inputs[:, 6 * part + 6 :] = 0
    return inputs, torch.tanh(inputs @ teacher / 3) + 0.3 * torch.randn(numel, 8, generator=generator)


def _train(compression: Compression | None) -> float:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
    optimizer = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)
    arguments = {"compression": compression, "timeout": timedelta(seconds=60)}
    with GossipDataParallel(module, optimizer, "ring", **arguments) as model:  # type: ignore[arg-type]
        for step in range(NUM_STEPS):
            inputs, targets = _batch(1 + model.rank + model.world_size * step, 16, part=model.rank)
            nn.functional.mse_loss(model(inputs), targets).backward()
        inputs, targets = _batch(10**6, 500)
        with model.averaged(), torch.no_grad():
            return float(nn.functional.mse_loss(module(inputs), targets))

"""Runs that are saved, stopped and resumed, and what tests compare of them."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from listening import logged
from replicas import NormalisedNet, assert_equal_states
from small_runs import finish
from torch import nn

from gossip import GossipDataParallel

assert_same, log_of = assert_equal_states, logged
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


class DroppingNet(NormalisedNet):
    """Its randomness is torch's; tied, frozen, bfloat16 and normalised parts, and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.register_buffer("calls", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1 + random.random()
        x = super().forward(nn.functional.dropout(x, 0.3))
        return x + self.narrow(x.bfloat16()) * float(np.random.rand())  # noqa: NPY002 -- the global generator is the point


def make_model(seed: int = 0, module: Callable[[], nn.Module] = DroppingNet, **options: Any) -> GossipDataParallel:
    """A model whose random numbers, from now on, are ``seed``'s and this rank's."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1000 * seed + rank)
    random.seed(1000 * seed + rank)
    np.random.seed(1000 * seed + rank)  # noqa: NPY002
    options = {"optimizer": ADAMW, "topology": "one_peer_exponential", "bucket_cap_mb": 71 / 2**20} | options
    return GossipDataParallel(module(), **options)


def one_step(model: GossipDataParallel, *schedulers: Any) -> None:
    """Data from the global generator: it, too, has to be resumed."""
    model(torch.randn(8, 4)).float().square().mean().backward()
    finish(model)
    for scheduler in schedulers:
        scheduler.step()


def everything(model: GossipDataParallel) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state, copied."""
    model.state_dict()  # what must be combined before it is read, is
    tensors = {name: tensor.detach().clone() for name, tensor in model.module.named_parameters()}
    tensors |= {name: tensor.clone() for name, tensor in model.module.named_buffers()}
    for number, entry in model.optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {key}": torch.as_tensor(value).clone() for key, value in entry.items()}
    return tensors


def undisturbed(num_steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """What a model of these options has after so many steps."""
    with make_model(**options) as model:
        for _ in range(num_steps):
            one_step(model)
        return everything(model)


def names_in(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())

"""Training takes four copies of the stacked parameters: parameters, gradients, momentum, and one message."""

import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from covering import covering
from live_memory import LiveBytes
from torch import nn

from gossip import VirtualWorkers

WORLD_SIZE = 64
SCRATCH = 0.05
"""What else there may be, in copies: activations of one sample a replica, and the weights of a round."""


def one_large_parameter() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 1000, bias=False), nn.Linear(1000, 1, bias=False))


def many_parameters() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(31, 31), nn.Tanh())])


@pytest.mark.parametrize(
    ("make", "topology", "clip_grad_norm"),
    covering(
        itertools.product(
            (one_large_parameter, many_parameters), ("one_peer_exponential", "ring", "complete"), (None, 1.0)
        )
    ),
)
def test_four_copies(make: Any, topology: str, clip_grad_norm: float | None) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    gc.collect()
    with LiveBytes() as memory:
        module = make()
        workers = VirtualWorkers(
            module, WORLD_SIZE, sgd, topology, clip_grad_norm=clip_grad_norm, bucket_cap_mb=1.0, devices=["cpu"]
        )
        copy_bytes = sum(stack.nbytes for stack in workers.parameters())
        memory.peak = memory.now
        inputs = torch.ones(WORLD_SIZE, next(module.parameters()).shape[1])
        for _ in range(4):
            workers(inputs).square().mean().backward()
        peak, after = memory.peak, memory.now
    assert after / copy_bytes > 3, "parameters, momentum, and a message stay: else nothing was counted"
    # In the backward pass autograd copies one parameter's gradient at a time, where that came out transposed.
    largest = max(stack.nbytes for stack in workers.parameters()) / copy_bytes
    assert peak / copy_bytes < 4 + largest + SCRATCH

"""A small model in every mode, and the dense recursion of its replicas."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

import topologies
from gossip import GossipDataParallel, VirtualWorkers

LR = 0.1
SGD = functools.partial(torch.optim.SGD, lr=LR)
TINY_BUCKETS = 71 / 2**20
TOPOLOGY = "one_peer_exponential"
MODES = {"in backward": {}, "all at once": {"clip_grad_norm": math.inf}, "outside": {"step_in_backward": False}}
Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""(module, rank, step) -> what is minimised then and there."""
Gradient = Callable[[int, int, np.ndarray], np.ndarray]
"""(rank, step, that rank's parameters [numel]) -> its gradient [numel]."""


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class Branches(nn.Module):
    """Four layers; the caller says which ones run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)).double()

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        for part in chosen:
            x = torch.tanh(self.parts[part](x))
        return x


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 3, generator=generator, dtype=torch.float64)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(batch(rank, step)).square().mean()


def wrap(module: nn.Module | None = None, **arguments: Any) -> GossipDataParallel:
    """A rank that hangs is an error long before the test's own time-out."""
    defaults = {"optimizer": SGD, "topology": TOPOLOGY, "bucket_cap_mb": TINY_BUCKETS, "timeout": timedelta(seconds=60)}
    return GossipDataParallel(module or make_module(), **(defaults | arguments))


def in_every_mode(make: Callable[[], nn.Module] = make_module, **arguments: Any) -> Iterable[GossipDataParallel]:
    """One model after the other; each is closed when the next one is asked for."""
    for mode in MODES.values():
        with wrap(make(), **(mode | arguments)) as model:
            yield model


def optimizers_of(model: GossipDataParallel | VirtualWorkers) -> Sequence[torch.optim.Optimizer]:
    return model.optimizer if isinstance(model.optimizer, tuple) else (model.optimizer,)


def finish(model: GossipDataParallel) -> None:
    """What the usual loop does after backward, where it has to."""
    optimizers = () if model._arguments.step_in_backward else optimizers_of(model)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def train(model: GossipDataParallel, steps: range, loss: Loss = loss_of) -> None:
    for step in steps:
        loss(model, model.rank, step).backward()
        finish(model)


def flat(module: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).numpy()


def gradient_at(module: nn.Module, x: np.ndarray, loss: Loss, rank: int, step: int) -> np.ndarray:
    """Of one rank's loss at its parameters ``x``; zero where there is none."""
    vector_to_parameters(torch.from_numpy(x.copy()), module.parameters())
    parameters = list(module.parameters())
    found = torch.autograd.grad(loss(module, rank, step), parameters, allow_unused=True)
    none = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([each.flatten() for each in none]).numpy()


def dense_recursion(
    topology: topologies.Topology,
    start: np.ndarray,
    gradient: Gradient,
    update: Callable[..., np.ndarray],
    num_steps: int,
    *,
    combines_first: bool = False,
) -> np.ndarray:
    """x after some steps, [n, numel].

    Adapt while communicating: x(t+1) = update of W_(t-1) x(t) by the gradients at x(t); with ``combines_first`` adapt
    then combine: x(t+1) = W_t times the update of x(t).
    """
    ranks = range(topology.world_size)
    x = np.tile(start, (topology.world_size, 1))
    for step in range(num_steps):
        gradients = np.stack([gradient(rank, step, x[rank]) for rank in ranks])
        mixed = x if combines_first or step == 0 else topology.round(step - 1).matrix() @ x
        x = update(mixed, gradients)
        if combines_first:
            x = topology.round(step).matrix() @ x
    return x


def rows_after(
    steps: range,
    world_size: int,
    *,
    make: Callable[[], nn.Module] = make_module,
    loss: Loss = loss_of,
    start: np.ndarray | None = None,
    topology: str | topologies.Topology = TOPOLOGY,
    edit: Callable[[int, int, np.ndarray], np.ndarray] | None = None,
    update: Callable[..., np.ndarray] = lambda x, gradients: x - LR * gradients,
    combines_first: bool = False,
) -> np.ndarray:
    """All ranks' parameters after ``steps``, which begin at equal replicas; [n, numel].

    ``edit(rank, step, x)`` is what the user makes of them before that step. What it adds stays, as an update's does.
    """
    schedule = topologies.build(topology, world_size) if isinstance(topology, str) else topology
    module = make()

    def gradient(rank: int, place: int, x: np.ndarray) -> np.ndarray:
        step = steps[place]
        edited = x if edit is None else edit(rank, step, x)
        return gradient_at(module, edited, loss, rank, step) - (edited - x) / LR

    shifted: Any = SimpleNamespace(world_size=world_size, round=lambda t: schedule.round(t + steps.start))
    begin = flat(module) if start is None else start
    return dense_recursion(shifted, begin, gradient, update, len(steps), combines_first=combines_first)


def assert_same(model: nn.Module, plain: nn.Module, atol: float = 0.0) -> None:
    """The parameters of both are equal, to the bit unless a tolerance is given."""
    for (name, actual), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_rows(model: GossipDataParallel, rows: np.ndarray) -> None:
    assert np.ptp(rows, axis=0).max() > 1e-3 or model.world_size == 1, "the ranks should differ: else nothing is shown"
    np.testing.assert_allclose(flat(model), rows[model.rank], rtol=0, atol=1e-12)

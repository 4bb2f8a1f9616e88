"""The dense recursion that a distributed run must reproduce: x <- W x + u, in plain numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from topologies import Topology

Gradient = Callable[[int, int, np.ndarray], np.ndarray]
"""(rank, step, that rank's parameters [numel]) -> its gradient [numel]."""


def dense_recursion(
    topology: Topology,
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


class Momentum:
    """torch.optim.SGD with momentum and coupled weight decay."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.01) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.buffer: np.ndarray | float = 0.0

    def __call__(self, x: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        self.buffer = self.momentum * self.buffer + gradients + self.weight_decay * x
        return x - self.lr * self.buffer


class AdamW:
    """torch.optim.AdamW: decoupled weight decay acts on the mixed parameters."""

    def __init__(self, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.first: np.ndarray | float = 0.0
        self.second: np.ndarray | float = 0.0
        self.step = 0

    def __call__(self, x: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        self.step += 1
        self.first = self.betas[0] * self.first + (1 - self.betas[0]) * gradients
        self.second = self.betas[1] * self.second + (1 - self.betas[1]) * gradients**2
        first = self.first / (1 - self.betas[0] ** self.step)
        second = self.second / (1 - self.betas[1] ** self.step)
        return x * (1 - self.lr * self.weight_decay) - self.lr * first / (np.sqrt(second) + 1e-8)

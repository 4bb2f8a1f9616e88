"""The contract table of algorithms: what each one computes, as a dense recursion in plain numpy.

A new algorithm enters by one row of ``ROWS`` and one function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

import topologies
from topologies import Topology

NUM_VALUES = 7
LEARNING_RATE = 0.05
MOMENTUM = 0.9

Array = np.ndarray[Any, np.dtype[np.float64]]


class Problem:
    """Rank i has f_i(x) = 0.5 |A_i x - b_i|^2; in some steps some ranks' gradients are not finite, and are skipped."""

    def __init__(self, world_size: int, num_steps: int, skipped: tuple[tuple[int, int], ...] = ()) -> None:
        random = np.random.default_rng(0)
        self.world_size, self.num_steps = world_size, num_steps
        self.start = random.normal(size=NUM_VALUES)
        self.matrices = random.normal(size=(world_size, NUM_VALUES, NUM_VALUES)) / 3
        self.targets = random.normal(size=(world_size, NUM_VALUES))
        self.skipped = skipped

    def gradients(self, x: Array, max_norm: float | None = None) -> Array:
        """Of each rank at its own x, [n, d], clipped."""
        residuals = np.einsum("nij,nj->ni", self.matrices, x) - self.targets
        gradients = np.einsum("nij,ni->nj", self.matrices, residuals)
        if max_norm is None:
            return gradients
        return gradients * np.minimum(1, max_norm / (np.linalg.norm(gradients, axis=1, keepdims=True) + 1e-6))

    def is_updated(self, step: int) -> Array:
        """Which ranks are, [n, 1]."""
        updated = np.ones((self.world_size, 1), dtype=bool)
        for rank, skipped in self.skipped:
            updated[rank] &= skipped != step
        return updated


class Sgd:
    """torch.optim.SGD with momentum, of all ranks."""

    def __init__(self, rates: Callable[[int], float]) -> None:
        self.rates = rates
        self.velocity: Array | float = 0.0

    def __call__(self, gradients: Array, updated: Array, step: int) -> Array:
        self.velocity = np.where(updated, MOMENTUM * self.velocity + gradients, self.velocity)
        return np.where(updated, -self.rates(step) * self.velocity, 0)


Dense = Callable[[Problem, Topology, Sgd, "float | None"], Array]
"""The values that forward passes read after all steps, [n, d]."""


def adapt_while_communicating(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        x = topology.round(step - 1).matrix() @ x if step else x
        x = x + sgd(gradients, problem.is_updated(step), step)
    return x


def adapt_then_combine(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    for step in range(problem.num_steps):
        x = x + sgd(problem.gradients(x, max_norm), problem.is_updated(step), step)
        x = topology.round(step).matrix() @ x
    return x


def exact_diffusion(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    lazy = (np.eye(problem.world_size) + topology.round(0).matrix()) / 2
    correction = np.zeros_like(x)  # x - psi, of the step before: in units of an update
    for step in range(problem.num_steps):
        correction = correction * sgd.rates(step) / sgd.rates(max(step - 1, 0))
        psi = x + sgd(problem.gradients(x, max_norm), problem.is_updated(step), step)
        x = lazy @ (psi + correction)
        correction = x - psi
    return x


def gradient_tracking(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    tracker = last = np.zeros_like(x)
    for step in range(problem.num_steps):
        gradients, updated = problem.gradients(x, max_norm), problem.is_updated(step)
        if step:
            matrix = topology.round(step - 1).matrix()
            x, tracker = matrix @ x, matrix @ tracker
        tracker = np.where(updated, tracker + gradients - last, tracker)
        last = np.where(updated, gradients, last)
        x = x + sgd(tracker, updated, step)
    return x


def momentum_exchange(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        if step:
            matrix = topology.round(step - 1).matrix()
            x, sgd.velocity = matrix @ x, matrix @ sgd.velocity
        x = x + sgd(gradients, problem.is_updated(step), step)
    return x


def push_sum(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x, weights = np.tile(problem.start, (problem.world_size, 1)), np.ones((problem.world_size, 1))
    for step in range(problem.num_steps):
        gradients = problem.gradients(x / weights, max_norm)
        if step:
            matrix = topology.round(step - 1).matrix()
            x, weights = matrix @ x, matrix @ weights
        x = x + sgd(gradients, problem.is_updated(step), step)
    return x / weights


class Row(NamedTuple):
    """What the contract knows of an algorithm.

    ``keeps_mean``: whether the average of the replicas follows the average of the updates.
    """

    dense: Dense
    topologies: tuple[str, ...]
    keeps_mean: bool = True


CHANGING = ("ring", "one_peer_exponential", "base")
ROWS: dict[str, Row] = {
    "adapt_while_communicating": Row(adapt_while_communicating, CHANGING),
    "adapt_then_combine": Row(adapt_then_combine, CHANGING),
    "exact_diffusion": Row(exact_diffusion, ("ring", "torus")),
    "gradient_tracking": Row(gradient_tracking, CHANGING),
    "momentum_exchange": Row(momentum_exchange, CHANGING),
    "push_sum": Row(push_sum, ("pushed", "ring", "one_peer_exponential"), keeps_mean=False),
}


def make_topology(name: str, world_size: int) -> Topology:
    """A family's; "pushed" is a directed graph with weights of which only the columns sum to 1."""
    if name != "pushed":
        return topologies.build(name, world_size)
    graph = nx.DiGraph([(rank, (rank + 1) % world_size) for rank in range(world_size)])
    graph.add_edges_from([(0, 2 % world_size), (1, 3 % world_size)])
    graph.remove_edges_from(nx.selfloop_edges(graph))
    return Topology.from_graph(graph, weights="push_sum")


def constant(_: int) -> float:
    return LEARNING_RATE


def halved_at_four(step: int) -> float:
    return LEARNING_RATE if step < 4 else LEARNING_RATE / 2

"""The contract table of algorithms: what each one computes, as a dense recursion in plain numpy.

A new algorithm enters by one row of ``ROWS`` and one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from quadratics import BUCKETS, MOMENTUM, Array, Problem, Sgd

import topologies
from gossip.algorithms import ALGORITHMS, Algorithm, IntegralCorrection, QuasiGlobalIntegral
from gossip.algorithms.forms import Form
from topologies import Round, Topology
from topologies.graphs.edge_colouring import edge_colouring

Dense = Callable[[Problem, Topology, Sgd, "float | None"], Array]
"""The values that forward passes read after all steps, [n, d]."""


def adapt_while_communicating(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        x = topology.round(step - 1).matrix() @ x if step else x
        x = x + sgd(gradients, problem.is_updated(step), step)
    return x


def asynchronous(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    """With ranks that are equally fast: the edges of each round in pairs, one matching after the other."""
    rounds = []
    for t in range(topology.period or 0):
        edges = np.argwhere(np.triu(topology.round(t).matrix(), 1) > 0)
        for matching in edge_colouring(edges):
            matrix = np.eye(problem.world_size)
            for i, j in matching:
                matrix[[[i], [j]], [i, j]] = 0.5
            rounds.append(Round.from_matrix(matrix))
    return adapt_while_communicating(problem, Topology.from_rounds(rounds), sgd, max_norm)


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


def gradient_tracking(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc"
) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    tracker = last = np.zeros_like(x)
    for step in range(problem.num_steps):
        gradients, updated = problem.gradients(x, max_norm), problem.is_updated(step)
        if step and form == "awc":
            matrix = topology.round(step - 1).matrix()
            x, tracker = matrix @ x, matrix @ tracker
        tracker = np.where(updated, tracker + gradients - last, tracker)
        last = np.where(updated, gradients, last)
        x = x + sgd(tracker, updated, step)
        if form == "atc":
            matrix = topology.round(step).matrix()
            x, tracker = matrix @ x, matrix @ tracker
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


def integral_correction(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc"
) -> Array:
    """Its gains by kind of topology are another test's matter."""
    gains = IntegralCorrection(form).on(topology).gains
    x = np.tile(problem.start, (problem.world_size, 1))
    correction, last = np.zeros_like(x), 0.0
    for step in range(problem.num_steps):
        gradients, rate = problem.gradients(x, max_norm), sgd.rates(step)
        if step and form == "awc":
            gamma, kappa = gains(step - 1)
            pull = topology.round(step - 1).matrix() @ x - x
            x, correction = x + gamma * pull, correction + kappa * pull
        correction = correction * rate / (last or rate)
        last = rate
        x = x + sgd(gradients, problem.is_updated(step), step) + correction
        if form == "atc":
            gamma, kappa = gains(step)
            pull = topology.round(step).matrix() @ x - x
            x, correction = x + gamma * pull, correction + kappa * pull
    return x


def extra(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    """As in the paper, by the two newest iterates, with the optimizer's update in the place of -eta g."""
    matrix = topology.round(0).matrix()
    lazy = (np.eye(problem.world_size) + matrix) / 2
    before = np.tile(problem.start, (problem.world_size, 1))
    update = sgd(problem.gradients(before, max_norm), problem.is_updated(0), 0)
    x = before + update
    for step in range(1, problem.num_steps):
        new = sgd(problem.gradients(x, max_norm), problem.is_updated(step), step)
        ratio = sgd.rates(step) / sgd.rates(step - 1)
        x, before, update = lazy @ x + new + ratio * (lazy @ x - lazy @ before - update), x, new
    return x


def momentum_tracking(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc"
) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    tracker = last = np.zeros_like(x)
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        if step and form == "awc":
            matrix = topology.round(step - 1).matrix()
            x, tracker = matrix @ x, matrix @ tracker
        ratio = sgd.rates(step) / sgd.rates(max(step - 1, 0))
        update = sgd(gradients, problem.is_updated(step), step)
        tracker, last = ratio * tracker + update - ratio * last, update
        x = x + tracker
        if form == "atc":
            matrix = topology.round(step).matrix()
            x, tracker = matrix @ x, matrix @ tracker
    return x


def adam_tracking(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc") -> Array:
    """With the constants that torch.optim.Adam has by default; of ``sgd`` it takes the rates alone."""
    size = problem.world_size
    x = np.tile(problem.start, (size, 1))
    tracker = last = mean = second = own = tracked = np.zeros_like(x)
    made = np.zeros((size, 1))
    for step in range(problem.num_steps):
        gradients, updated = problem.gradients(x, max_norm), problem.is_updated(step)
        if step and form == "awc":
            matrix = topology.round(step - 1).matrix()
            x, tracker = matrix @ x, matrix @ tracker
        rate, earlier = sgd.rates(step), sgd.rates(max(step - 1, 0))
        own_now = 0.999 * own + 0.001 * gradients**2
        average = (tracker / earlier) ** 2 * second / (1 - 0.999 ** np.maximum(made, 1))
        limit = own_now / (1 - 0.999 ** (made + 1))
        tracked_now = 0.999 * tracked + 0.001 * np.minimum(np.where(made == 0, gradients**2, average), limit)
        shared = np.minimum(tracked_now, own_now)
        now = own_now, tracked_now, shared + (own_now - shared) / size, 0.9 * mean + 0.1 * gradients, made + 1
        own, tracked, second, mean, made = (
            np.where(updated, new, old) for new, old in zip(now, (own, tracked, second, mean, made), strict=True)
        )
        counted = np.maximum(made, 1)
        root = np.sqrt(second / (1 - 0.999**counted)) + 1e-8
        update = np.where(updated, -rate * mean / (1 - 0.9**counted) / root, 0)
        tracker, last = rate / earlier * (tracker - last) + update, update
        x = x + tracker
        if form == "atc":
            matrix = topology.round(step).matrix()
            x, tracker = matrix @ x, matrix @ tracker
    return x


def quasi_global_momentum(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", beta: float = 0.9
) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    momentum = np.zeros_like(x)
    for step in range(problem.num_steps):
        before, gradients = x, problem.gradients(x, max_norm)
        if step and form == "awc":
            x = topology.round(step - 1).matrix() @ x
        x = x + sgd(gradients + beta * momentum, problem.is_updated(step), step)
        if form == "atc":
            x = topology.round(step).matrix() @ x
        momentum = beta * momentum + (1 - beta) * (before - x) / sgd.rates(step)
    return x


def quasi_global_integral(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", beta: float = 0.9
) -> Array:
    gains = QuasiGlobalIntegral(beta, form).on(topology).gains
    x = np.tile(problem.start, (problem.world_size, 1))
    momentum, correction = np.zeros_like(x), np.zeros_like(x)
    for step in range(problem.num_steps):
        before, gradients = x, problem.gradients(x, max_norm)
        if step and form == "awc":
            gamma, kappa = gains(step - 1)
            pull = topology.round(step - 1).matrix() @ x - x
            x, correction = x + gamma * pull, correction + kappa * pull
        correction = correction * sgd.rates(step) / sgd.rates(max(step - 1, 0))
        direction = gradients + beta * (gradients + beta * momentum)
        x = x + sgd(direction, problem.is_updated(step), step) + correction
        if form == "atc":
            gamma, kappa = gains(step)
            pull = topology.round(step).matrix() @ x - x
            x, correction = x + gamma * pull, correction + kappa * pull
        momentum = beta * momentum + (1 - beta) * (before - x) / sgd.rates(step)
    return x


def decentlam(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, beta: float = 0.9) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    momentum = np.zeros_like(x)
    for step in range(problem.num_steps):
        rate, update = sgd.rates(step), sgd(problem.gradients(x, max_norm), problem.is_updated(step), step)
        momentum = beta * momentum + (x - topology.round(step).matrix() @ (x + update)) / rate
        x = x - rate * momentum
    return x


def diloco(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", period: int = 3
) -> Array:
    assert topology.name == "complete"
    x = np.tile(problem.start, (problem.world_size, 1))
    anchor, velocity, is_under_way = problem.start, np.zeros_like(problem.start), False
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        for now in ("awc", "atc"):
            if is_under_way and form == now:
                delta = anchor - x.mean(0)
                velocity = 0.9 * velocity + delta
                anchor = anchor - 0.7 * (delta + 0.9 * velocity)
                x, is_under_way = np.tile(anchor, (problem.world_size, 1)), False
            if now == "awc":
                x = x + sgd(gradients, problem.is_updated(step), step)
                is_under_way = (step + 1) % period == 0
    return x


def gossip_pga(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", period: int = 3
) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    average = np.full((problem.world_size, problem.world_size), 1 / problem.world_size)

    def matrix(step: int) -> Array:
        return topology.round(step).matrix() if (step + 1) % period else average

    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        x = matrix(step - 1) @ x if step and form == "awc" else x
        x = x + sgd(gradients, problem.is_updated(step), step)
        x = matrix(step) @ x if form == "atc" else x
    return x


def slowmo(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", period: int = 3
) -> Array:
    x = np.tile(problem.start, (problem.world_size, 1))
    anchor, velocity = problem.start, np.zeros_like(problem.start)

    def combine(step: int) -> Array:
        nonlocal anchor, velocity
        if (step + 1) % period:
            return topology.round(step).matrix() @ x
        velocity = 0.5 * velocity + (anchor - x.mean(0)) / sgd.rates(step)
        anchor = anchor - 0.7 * sgd.rates(step) * velocity
        return np.tile(anchor, (problem.world_size, 1))

    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        x = combine(step - 1) if step and form == "awc" else x
        x = x + sgd(gradients, problem.is_updated(step), step)
        x = combine(step) if form == "atc" else x
    return x


def noloco(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", period: int = 3
) -> Array:
    x = anchor = np.tile(problem.start, (problem.world_size, 1))
    velocity = np.zeros_like(x)
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        for now in ("awc", "atc"):
            done = step + (now == "atc")  # steps whose updates are in x
            if form == now and done and done % period == 0:
                matrix = topology.round(done // period - 1).matrix()
                velocity = 0.5 * velocity + 0.7 * matrix @ (x - anchor) - (anchor - matrix @ anchor)
                anchor = anchor + velocity
                x = anchor
            if now == "awc":
                x = x + sgd(gradients, problem.is_updated(step), step)
    return x


def relay_sum(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc") -> Array:
    """By the distances in the tree alone: what a rank averages is as old as its source is far away."""
    size = problem.world_size
    distances = dict(nx.all_pairs_shortest_path_length(topology.round(0).graph.to_undirected()))
    x, updated = np.tile(problem.start, (size, 1)), []

    def combine() -> Array:
        def known(rank: int, source: int) -> Array:
            age = max(distances[rank][source] - 1, 0)
            return updated[-1 - age][source] if age < len(updated) else problem.start

        return np.stack([np.mean([known(rank, source) for source in range(size)], 0) for rank in range(size)])

    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        x = combine() if step and form == "awc" else x
        x = x + sgd(gradients, problem.is_updated(step), step)
        updated.append(x)
        x = combine() if form == "atc" else x
    return x


def streaming_diloco(problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
    """In two parts, which are the buckets, every 4 steps, 2 steps late."""
    assert topology.name == "complete"
    x = np.tile(problem.start, (problem.world_size, 1))
    anchor, velocity, sent = problem.start.copy(), np.zeros_like(problem.start), {}
    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        if step - 2 in sent:
            part, means = sent[step - 2]
            delta = anchor[part] - means
            velocity[part] = 0.9 * velocity[part] + delta
            anchor[part] -= 0.7 * (delta + 0.9 * velocity[part])
            x = x.copy()
            x[:, part] = 0.5 * x[:, part] + 0.5 * anchor[part]
        x = x + sgd(gradients, problem.is_updated(step), step)
        if (step + 1) % 4 == 0:
            sent[step] = BUCKETS[0], x[:, BUCKETS[0]].mean(0)
        if step > 1 and (step - 1) % 4 == 0:
            sent[step] = BUCKETS[1], x[:, BUCKETS[1]].mean(0)
    return x


def sparse_loco(
    problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: Form = "awc", period: int = 3
) -> Array:
    """Of each bucket the larger half, on 16 points."""
    assert topology.name == "complete"
    x = np.tile(problem.start, (problem.world_size, 1))
    anchor, error = problem.start, np.zeros_like(x)

    def sent(message: Array) -> Array:
        found = np.zeros_like(message)
        for part in BUCKETS:
            values = message[:, part]
            kept = np.argsort(-np.abs(values), 1)[:, : -(-values.shape[1] // 2)]
            scales = np.abs(values).max(1, keepdims=True)
            points = np.clip(np.floor((values / np.where(scales, scales, 1) + 1) * 8), 0, 15)
            rounded = ((points + 0.5) / 8 - 1) * scales
            sparse = np.zeros_like(values)
            np.put_along_axis(sparse, kept, np.take_along_axis(rounded, kept, 1), 1)
            found[:, part] = sparse
        return found

    for step in range(problem.num_steps):
        gradients = problem.gradients(x, max_norm)
        for now in ("awc", "atc"):
            done = step + (now == "atc")  # steps whose updates are in x
            if form == now and done and done % period == 0:
                message = 0.95 * error + anchor - x
                error = message - sent(message)
                anchor = anchor - sent(message).mean(0)
                x = np.tile(anchor, (problem.world_size, 1))
            if now == "awc":
                x = x + sgd(gradients, problem.is_updated(step), step)
    return x


class Row(NamedTuple):
    """What the contract knows of an algorithm.

    ``keeps_mean``: whether the average of the replicas follows the average of the updates. ``options``: its arguments.
    ``momentum``: of SGD; None: the optimizer is Adam. ``is_in_step``: whether real processes make their steps together;
    what others compute is held to their own account of it elsewhere.
    """

    dense: Dense
    topologies: tuple[str, ...]
    keeps_mean: bool = True
    options: Mapping[str, Any] = {}
    momentum: float | None = MOMENTUM
    is_in_step: bool = True


CHANGING = ("ring", "one_peer_exponential", "base")
EVERY_3 = {"period": 3}
TREES = ("path", "star")
AWC_AND_ATC: dict[str, tuple[Callable[..., Array], float | None]] = {
    "adam_tracking": (adam_tracking, None),
    "gradient_tracking": (gradient_tracking, MOMENTUM),
    "integral_correction": (integral_correction, MOMENTUM),
    "momentum_tracking": (momentum_tracking, MOMENTUM),
    "quasi_global_integral": (quasi_global_integral, 0.0),
    "quasi_global_momentum": (quasi_global_momentum, 0.0),
}
ROWS: dict[str, Row] = {
    "adapt_while_communicating": Row(adapt_while_communicating, CHANGING),
    "adapt_then_combine": Row(adapt_then_combine, CHANGING),
    "asynchronous": Row(asynchronous, ("ring", "base"), is_in_step=False),
    "decentlam": Row(decentlam, ("ring", "torus"), momentum=0.0),
    "diloco": Row(partial(diloco, form="atc"), ("complete",), keeps_mean=False, options={"period": 3}),
    "diloco(awc)": Row(diloco, ("complete",), keeps_mean=False, options={"period": 3, "form": "awc"}),
    "gossip_pga": Row(gossip_pga, CHANGING, options=EVERY_3),
    "gossip_pga(atc)": Row(partial(gossip_pga, form="atc"), CHANGING, options={"period": 3, "form": "atc"}),
    "noloco": Row(partial(noloco, form="atc"), (*CHANGING, "random_matching"), keeps_mean=False, options=EVERY_3),
    "noloco(awc)": Row(noloco, (*CHANGING, "random_matching"), keeps_mean=False, options={"period": 3, "form": "awc"}),
    "relay_sum": Row(partial(relay_sum, form="atc"), TREES, keeps_mean=False),
    "relay_sum(awc)": Row(relay_sum, TREES, keeps_mean=False, options={"form": "awc"}),
    "slowmo": Row(slowmo, CHANGING, keeps_mean=False, options={"period": 3, "slow_lr": 0.7}),
    "slowmo(atc)": Row(
        partial(slowmo, form="atc"), CHANGING, keeps_mean=False, options={"period": 3, "slow_lr": 0.7, "form": "atc"}
    ),
    "sparse_loco": Row(
        partial(sparse_loco, form="atc"),
        ("complete",),
        keeps_mean=False,
        options={"period": 3, "ratio": 0.5, "bits": 4},
    ),
    "sparse_loco(awc)": Row(
        sparse_loco, ("complete",), keeps_mean=False, options={"period": 3, "ratio": 0.5, "bits": 4, "form": "awc"}
    ),
    "streaming_diloco": Row(
        streaming_diloco, ("complete",), keeps_mean=False, options={"period": 4, "parts": 2, "overlap": 2}
    ),
    "exact_diffusion": Row(exact_diffusion, ("ring", "torus")),
    "extra": Row(extra, ("ring", "torus")),
    "momentum_exchange": Row(momentum_exchange, CHANGING),
    "push_sum": Row(push_sum, ("pushed", "ring", "one_peer_exponential"), keeps_mean=False),
    **{name: Row(dense, CHANGING, momentum=momentum) for name, (dense, momentum) in AWC_AND_ATC.items()},
    **{
        f"{name}(atc)": Row(partial(dense, form="atc"), CHANGING, options={"form": "atc"}, momentum=momentum)
        for name, (dense, momentum) in AWC_AND_ATC.items()
    },
}


def make_algorithm(label: str) -> Algorithm:
    """That of a row, whose label is its name and what else tells it from others."""
    return ALGORITHMS.get(label.partition("(")[0])(**ROWS[label].options)


def make_topology(name: str, world_size: int) -> Topology:
    """A family's; "pushed" is a directed graph with weights of which only the columns sum to 1."""
    if name != "pushed":
        return topologies.build(name, world_size)
    graph = nx.DiGraph([(rank, (rank + 1) % world_size) for rank in range(world_size)])
    graph.add_edges_from([(0, 2 % world_size), (1, 3 % world_size)])
    graph.remove_edges_from(nx.selfloop_edges(graph))
    return Topology.from_graph(graph, weights="push_sum")

"""What each algorithm computes, as a dense recursion in plain numpy; :mod:`algorithm_table` has their contract."""

# ruff: noqa: ARG002 - the methods of a recursion are all called with the step, needed or not

import math

import networkx as nx
import numpy as np
from quadratics import Array, Problem, Sgd

import gossip
from gossip.algorithms.base import Form
from topologies import Round, Topology
from topologies.graphs.edge_colouring import edge_colouring

PERIOD = 3
"""Of algorithms that do something else from time to time."""


class Recursion:
    """All ranks' values and what an algorithm keeps, [n, d]; here of "adapt while communicating".

    ``form`` is "awc": values are combined between the gradients of a step and its updates; "atc": after the updates;
    or "": a subclass combines them where it updates them.
    """

    form: Form | str = "awc"

    def __init__(self, problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None, form: str) -> None:
        self.problem, self.topology, self.sgd, self.max_norm, self.form = problem, topology, sgd, max_norm, form
        self.x = np.tile(problem.start, (problem.world_size, 1))
        self.zeros = np.zeros_like(self.x)
        self.begin()

    def run(self) -> Array:
        """The values that forward passes read after all steps."""
        for step in range(self.problem.num_steps):
            before, gradients = self.x, self.problem.gradients(self.read(), self.max_norm)
            if step and self.form == "awc":
                self.combine(step - 1)
            self.update(step, gradients, self.problem.is_updated(step))
            if self.form == "atc":
                self.combine(step)
            self.end(step, before)
        return self.read()

    def begin(self) -> None:
        """Make what is kept."""

    def end(self, step: int, before: Array) -> None:
        """Note what the step has made of the values ``before`` it."""

    def read(self) -> Array:
        return self.x

    def combine(self, step: int) -> None:
        self.x = self.matrix(step) @ self.x

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        self.x = self.x + self.sgd(gradients, updated, step)

    def matrix(self, step: int) -> Array:
        return self.topology.round(step).matrix()

    def lazy(self) -> Array:
        return (np.eye(len(self.x)) + self.matrix(0)) / 2

    def ratio(self, step: int) -> float:
        """Of the learning rate to that of the step before: what is kept in units of an update follows it."""
        return self.sgd.rates(step) / self.sgd.rates(max(step - 1, 0))

    def everywhere(self, values: Array) -> Array:
        return np.tile(values, (len(self.x), 1))


class AdaptThenCombine(Recursion):
    form = "atc"


class Asynchronous(Recursion):
    """With ranks that are equally fast: the edges of each round in pairs, one matching after the other."""

    def begin(self) -> None:
        rounds = []
        for t in range(self.topology.period or 0):
            for matching in edge_colouring(np.argwhere(np.triu(self.matrix(t), 1) > 0)):
                matrix = np.eye(len(self.x))
                for i, j in matching:
                    matrix[[[i], [j]], [i, j]] = 0.5
                rounds.append(Round.from_matrix(matrix))
        self.topology = Topology.from_rounds(rounds)


class ExactDiffusion(Recursion):
    form = "atc"

    def begin(self) -> None:
        self.correction = self.zeros  # x - psi, of the step before: in units of an update

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        self.psi = self.x + self.sgd(gradients, updated, step)
        self.x = self.psi + self.correction * self.ratio(step)

    def combine(self, step: int) -> None:
        self.x = self.lazy() @ self.x
        self.correction = self.x - self.psi


class Extra(Recursion):
    """As in the paper, by the two newest iterates, with the optimizer's update in the place of -eta g."""

    form = ""

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        x, new = self.x, self.sgd(gradients, updated, step)
        if step == 0:
            self.x = x + new
        else:
            change = self.lazy() @ (x - self.before) - self.last
            self.x = self.lazy() @ x + new + self.ratio(step) * change
        self.before, self.last = x, new


class Tracking(Recursion):
    def begin(self) -> None:
        self.tracker = self.last = self.zeros

    def combine(self, step: int) -> None:
        super().combine(step)
        self.tracker = self.matrix(step) @ self.tracker


class GradientTracking(Tracking):
    def update(self, step: int, gradients: Array, updated: Array) -> None:
        self.tracker = np.where(updated, self.tracker + gradients - self.last, self.tracker)
        self.last = np.where(updated, gradients, self.last)
        super().update(step, self.tracker, updated)


class MomentumTracking(Tracking):
    def update(self, step: int, gradients: Array, updated: Array) -> None:
        update = self.sgd(gradients, updated, step)
        self.tracker = self.ratio(step) * (self.tracker - self.last) + update
        self.last = update
        self.x = self.x + self.tracker


class AdamTracking(Tracking):
    """With the constants that torch.optim.Adam has by default; of ``sgd`` it takes the rates alone."""

    def begin(self) -> None:
        super().begin()
        self.kept = (self.zeros, self.zeros, self.zeros, self.zeros, np.zeros((len(self.x), 1)))

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        own, tracked, second, mean, made = self.kept
        own_now = 0.999 * own + 0.001 * gradients**2
        earlier = self.sgd.rates(max(step - 1, 0))
        average = (self.tracker / earlier) ** 2 * second / (1 - 0.999 ** np.maximum(made, 1))
        limit = own_now / (1 - 0.999 ** (made + 1))
        tracked_now = 0.999 * tracked + 0.001 * np.minimum(np.where(made == 0, gradients**2, average), limit)
        shared = np.minimum(tracked_now, own_now)
        second_now = shared + (own_now - shared) / len(self.x)
        now = own_now, tracked_now, second_now, 0.9 * mean + 0.1 * gradients, made + 1
        self.kept = tuple(np.where(updated, new, old) for new, old in zip(now, self.kept, strict=True))
        _, _, second, mean, made = self.kept
        counted = np.maximum(made, 1)
        root = np.sqrt(second / (1 - 0.999**counted)) + 1e-8
        update = np.where(updated, -self.sgd.rates(step) * mean / (1 - 0.9**counted) / root, 0)
        self.tracker = self.ratio(step) * (self.tracker - self.last) + update
        self.last = update
        self.x = self.x + self.tracker


class MomentumExchange(Recursion):
    def combine(self, step: int) -> None:
        super().combine(step)
        self.sgd.velocity = self.matrix(step) @ self.sgd.velocity


class DESLOC(Recursion):
    """With torch.optim.Adam; in each step an exchange, in every other one first moments, in every third one second."""

    PERIODS = (2, 3)

    def begin(self) -> None:
        self.moments, self.made = [self.zeros, self.zeros], np.zeros((len(self.x), 1))

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        decays, news = (0.9, 0.999), (gradients, gradients**2)
        pairs = zip(decays, self.moments, news, strict=True)
        self.moments = [np.where(updated, decay * old + (1 - decay) * new, old) for decay, old, new in pairs]
        self.made = self.made + updated
        first, second = (each / (1 - decay**self.made) for each, decay in zip(self.moments, decays, strict=True))
        self.x = self.x - np.where(updated, self.sgd.rates(step) * first / (np.sqrt(second) + 1e-8), 0)

    def combine(self, step: int) -> None:
        super().combine(step)
        for place, every in enumerate(self.PERIODS):
            if is_in_turn(self.topology, every, step):
                self.moments[place] = self.matrix(step) @ self.moments[place]


class DESLOCOfMomentum(Recursion):
    def combine(self, step: int) -> None:
        super().combine(step)
        if is_in_turn(self.topology, 3, step):
            self.sgd.velocity = self.matrix(step) @ self.sgd.velocity


def is_in_turn(topology: Topology, every: int, exchange: int) -> bool:
    """Whether it is the exchange of its block, the last one; after each cycle of rounds that it meets one earlier."""
    common = math.gcd(every, topology.period)
    num_cycles = exchange // every // (topology.period // common)
    return exchange % every == every - 1 - num_cycles % common


class HeavyBall(Recursion):
    def begin(self) -> None:
        self.velocity = self.zeros

    def combine(self, step: int) -> None:
        self.velocity = 0.5 * self.velocity + self.matrix(step) @ self.x - self.x
        self.x = self.x + 0.5 * self.velocity


class PushSum(Recursion):
    def begin(self) -> None:
        self.weights = np.ones((len(self.x), 1))

    def read(self) -> Array:
        return self.x / self.weights

    def combine(self, step: int) -> None:
        super().combine(step)
        self.weights = self.matrix(step) @ self.weights


class WeightedPushSum(PushSum):
    def begin(self) -> None:
        self.weights = self.problem.samples(0)[:, None]
        self.x = self.x * self.weights

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        self.x = self.x + self.problem.samples(step)[:, None] * self.sgd(gradients, updated, step)


class IntegralCorrection(Recursion):
    """Its gains by kind of topology are another test's matter."""

    def begin(self) -> None:
        self.gains = gossip.IntegralCorrection(self.form).on(self.topology).gains
        self.correction = self.zeros

    def combine(self, step: int) -> None:
        gamma, kappa = self.gains(step)
        pull = self.matrix(step) @ self.x - self.x
        self.x, self.correction = self.x + gamma * pull, self.correction + kappa * pull

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        self.correction = self.correction * self.ratio(step)
        self.x = self.x + self.sgd(gradients, updated, step) + self.correction


class SharedSecondMoments(IntegralCorrection):
    """With torch.optim.Adam, whose second moments are mixed like the values, but without gamma."""

    def begin(self) -> None:
        super().begin()
        DESLOC.begin(self)

    def combine(self, step: int) -> None:
        super().combine(step)
        self.moments[1] = self.matrix(step) @ self.moments[1]

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        DESLOC.update(self, step, gradients, updated)
        self.correction = self.correction * self.ratio(step)
        self.x = self.x + self.correction


class QuasiGlobalMomentum(Recursion):
    beta = 0.9

    def begin(self) -> None:
        self.momentum = self.zeros

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        super().update(step, gradients + self.beta * self.momentum, updated)

    def end(self, step: int, before: Array) -> None:
        moved = (before - self.x) / self.sgd.rates(step)
        self.momentum = self.beta * self.momentum + (1 - self.beta) * moved


class QuasiGlobalIntegral(IntegralCorrection):
    beta, end = 0.9, QuasiGlobalMomentum.end

    def begin(self) -> None:
        super().begin()
        self.gains = gossip.QuasiGlobalIntegral(self.beta, self.form).on(self.topology).gains
        self.momentum = self.zeros

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        direction = gradients + self.beta * self.momentum
        super().update(step, gradients + self.beta * direction, updated)


class DecentLaM(Recursion):
    form, beta = "", 0.9

    def begin(self) -> None:
        self.momentum = self.zeros

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        rate, update = self.sgd.rates(step), self.sgd(gradients, updated, step)
        moved = self.x - self.matrix(step) @ (self.x + update)
        self.momentum = self.beta * self.momentum + moved / rate
        self.x = self.x - rate * self.momentum


class GossipPGA(Recursion):
    def matrix(self, step: int) -> Array:
        return super().matrix(step) if (step + 1) % PERIOD else np.full((len(self.x), len(self.x)), 1 / len(self.x))


class RelaySum(Recursion):
    """By the distances in the tree alone: what a rank averages is as old as its source is far away."""

    form = "atc"

    def begin(self) -> None:
        self.distances = dict(nx.all_pairs_shortest_path_length(self.topology.round(0).graph.to_undirected()))
        self.updated: list[Array] = []

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        super().update(step, gradients, updated)
        self.updated.append(self.x)

    def combine(self, step: int) -> None:
        ranks = range(len(self.x))
        self.x = np.stack([np.mean([self.known(rank, source) for source in ranks], 0) for rank in ranks])

    def known(self, rank: int, source: int) -> Array:
        age = max(self.distances[rank][source] - 1, 0)
        return self.updated[-1 - age][source] if age < len(self.updated) else self.problem.start

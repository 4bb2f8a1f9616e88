"""What algorithms with outer steps compute, as dense recursions; :mod:`algorithm_table` has their contract."""

# ruff: noqa: ARG002 - the methods of a recursion are all called with the step, needed or not

import numpy as np
from quadratics import BUCKETS, Array
from recursions import PERIOD, Recursion

import gossip


class Anchored(Recursion):
    """Between two exchanges ranks train alone."""

    form = "atc"

    def begin(self) -> None:
        self.anchor, self.velocity = self.problem.start.copy(), np.zeros_like(self.problem.start)

    def combine(self, step: int) -> None:
        if (step + 1) % PERIOD == 0:
            self.exchange(step)


class DiLoCo(Anchored):
    def exchange(self, step: int) -> None:
        self.step_anchor(slice(None), self.x.mean(0))
        self.x = self.everywhere(self.anchor)

    def step_anchor(self, part: slice, mean: Array) -> None:
        delta = self.anchor[part] - mean
        self.velocity[part] = 0.9 * self.velocity[part] + delta
        self.anchor[part] -= 0.7 * (delta + 0.9 * self.velocity[part])


class DiLoCoWithAdam(DiLoCo):
    adam: tuple[int, Array, Array] | None = None

    def step_anchor(self, part: slice, mean: Array) -> None:
        self.anchor[part], self.adam = adam(self.anchor[part], self.anchor[part] - mean, self.adam)


def adam(anchor: Array, delta: Array, state: tuple[int, Array, Array] | None) -> tuple[Array, tuple[int, Array, Array]]:
    """A step at the rate 0.1, and the state after it."""
    count, first, second = state or (0, np.zeros_like(delta), np.zeros_like(delta))
    count, first, second = count + 1, 0.9 * first + 0.1 * delta, 0.999 * second + 0.001 * delta**2
    step = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
    return anchor - 0.1 * step, (count, first, second)


class WeightedDiLoCo(DiLoCo):
    def exchange(self, step: int) -> None:
        samples = sum(self.problem.samples(each) for each in range(step + 1 - PERIOD, step + 1))
        self.step_anchor(slice(None), samples @ self.x / sum(samples))
        self.x = self.everywhere(self.anchor)


class StreamingDiLoCo(DiLoCo):
    """In two parts, which are the buckets, every 4 steps, 2 steps late."""

    form = ""

    def begin(self) -> None:
        super().begin()
        self.sent: dict[int, tuple[slice, Array]] = {}

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        if step - 2 in self.sent:
            part, means = self.sent[step - 2]
            self.step_anchor(part, means)
            self.x = self.x.copy()
            self.x[:, part] = 0.5 * self.x[:, part] + 0.5 * self.anchor[part]
        super().update(step, gradients, updated)
        for part, first in zip(BUCKETS, (0, 2), strict=True):
            if step >= first and (step + 1 - first) % 4 == 0:
                self.sent[step] = part, self.x[:, part].mean(0)


class EagerDiLoCo(StreamingDiLoCo):
    """A part moves when it is sent."""

    def begin(self) -> None:
        self.anchor, self.velocity, self.others, self.sent = self.x.copy(), self.zeros.copy(), self.zeros.copy(), {}

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        if step - 2 in self.sent:
            part, moved = self.sent[step - 2]
            self.others[:, part] = (moved.sum(0) - moved) / len(moved)
        Anchored.update(self, step, gradients, updated)
        self.x = self.x.copy()
        for part, first in zip(BUCKETS, (0, 2), strict=True):
            if step >= first and (step + 1 - first) % 4 == 0:
                moved = self.anchor[:, part] - self.x[:, part]
                self.sent[step] = part, moved
                delta = moved / len(moved) + self.others[:, part]
                self.velocity[:, part] = 0.9 * self.velocity[:, part] + delta
                self.anchor[:, part] -= 0.7 * (delta + 0.9 * self.velocity[:, part])
                self.x[:, part] = 0.5 * self.x[:, part] + 0.5 * self.anchor[:, part]


class SlowMo(Anchored):
    form = "awc"

    def combine(self, step: int) -> None:
        if (step + 1) % PERIOD:
            self.x = self.matrix(step) @ self.x
            return
        rate = self.sgd.rates(step)
        self.velocity = 0.5 * self.velocity + (self.anchor - self.x.mean(0)) / rate
        self.anchor = self.anchor - 0.7 * rate * self.velocity
        self.x = self.everywhere(self.anchor)


class NoLoCo(Anchored):
    def begin(self) -> None:
        self.anchor, self.velocity = self.x, self.zeros

    def exchange(self, step: int) -> None:
        matrix = self.matrix((step + 1) // PERIOD - 1)
        pull = self.anchor - matrix @ self.anchor
        self.velocity = 0.5 * self.velocity + 0.7 * matrix @ (self.x - self.anchor) - pull
        self.x = self.anchor = self.anchor + self.velocity


class GASLoC(Anchored):
    """In both forms a rank's own part of an outer step ends with local ones, before anything reads the values."""

    gamma = 0.3

    def begin(self) -> None:
        self.anchor = self.before = self.x

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        super().update(step, gradients, updated)
        if (step + 1) % PERIOD == 0:
            self.x = self.outer_step(self.anchor - self.x)

    def outer_step(self, delta: Array) -> Array:
        return self.anchor - 0.7 * delta

    def exchange(self, step: int) -> None:
        reached, matrix = self.x, self.matrix((step + 1) // PERIOD - 1)
        self.x = self.anchor = matrix @ reached + self.gamma * (reached - self.before)
        self.before = reached


class GASLoCWithMomentum(GASLoC):
    """Heavy-ball momentum with dampening, which torch's SGD does not apply to its first gradient."""

    gamma, velocity = 0.2, None

    def outer_step(self, delta: Array) -> Array:
        self.velocity = delta if self.velocity is None else 0.5 * self.velocity + 0.75 * delta
        return self.anchor - 0.7 * self.velocity


class FactoredGossip(Anchored):
    """In both forms an outer step ends with local ones, before anything reads the values."""

    form = "awc"
    rounds = overlap = 1

    def begin(self) -> None:
        self.anchor, self.velocity = self.x, self.zeros

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        super().update(step, gradients, updated)
        if (step + 1) % PERIOD == 0:
            self.x = self.anchor = self.outer_step(self.anchor - self.x)

    def outer_step(self, delta: Array) -> Array:
        self.velocity = 0.5 * self.velocity + delta
        return self.anchor - 0.7 * (delta + 0.5 * self.velocity)

    def combine(self, step: int) -> None:
        outer_steps, later = divmod(step + 2 - self.overlap, PERIOD)
        if outer_steps > 0 and later < self.rounds:
            pull = self.matrix(outer_steps * self.rounds + later - 1) @ self.anchor - self.anchor
            self.x, self.anchor = self.x + pull, self.anchor + pull


class LateFactoredGossip(FactoredGossip):
    overlap = 2


class CorrectedFactoredGossip(FactoredGossip):
    """What mixing moves an anchor is added up, and a part of each local step; the gain is another test's matter."""

    rounds = PERIOD

    def begin(self) -> None:
        super().begin()
        self.gain = gossip.FactoredGossip(PERIOD, rounds=PERIOD, kappa=0.4).on(self.topology).gain
        self.correction = self.zeros

    def update(self, step: int, gradients: Array, updated: Array) -> None:
        self.correction = self.correction * self.ratio(step)
        self.x = self.x + self.correction / PERIOD
        super().update(step, gradients, updated)

    def combine(self, step: int) -> None:
        before = self.anchor
        super().combine(step)
        self.correction = self.correction + self.gain * (self.anchor - before)


class FactoredGossipWithAdam(FactoredGossip):
    adam: tuple[int, Array, Array] | None = None

    def outer_step(self, delta: Array) -> Array:
        values, self.adam = adam(self.anchor, delta, self.adam)
        return values


class SparseLoCo(Anchored):
    """Of each bucket the larger half, on 16 points."""

    def begin(self) -> None:
        super().begin()
        self.error = self.zeros

    def exchange(self, step: int) -> None:
        message = 0.95 * self.error + self.anchor - self.x
        sent = np.zeros_like(message)
        for part in BUCKETS:
            values = message[:, part]
            kept = np.argsort(-np.abs(values), 1)[:, : -(-values.shape[1] // 2)]
            scales = np.abs(values).max(1, keepdims=True)
            points = np.clip(np.floor((values / np.where(scales, scales, 1) + 1) * 8), 0, 15)
            rounded = ((points + 0.5) / 8 - 1) * scales
            np.put_along_axis(sent[:, part], kept, np.take_along_axis(rounded, kept, 1), 1)
        self.error = message - sent
        self.anchor = self.anchor - sent.mean(0)
        self.x = self.everywhere(self.anchor)

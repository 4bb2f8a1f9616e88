"""Ranks whose algorithm keeps a state, while some die, leave, join and come back; and the recursion for it."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import unsupervised
from elastic_ranks import RATE, Dropped, joins, make_model, read_dropped, recorded, steps_until, targets, without
from fault_places import injected

import topologies
from gossip.lab.faults.fault import Fault

NUMEL = 8
NUM_MORE = 16

Array = np.ndarray[Any, Any]


class Moment(NamedTuple):
    """A rank in one step: who trains, what its forward pass reads, [2, numel], and what it keeps, [2, numel] each."""

    members: tuple[int, ...]
    values: Array
    kept: dict[str, Array]


class Story(NamedTuple):
    """What a rank tells: its member numbers by step, its moments by step, its distance from consensus in the end."""

    member: int
    moments: dict[int, Moment]
    distance: float


class Changes(NamedTuple):
    """What becomes of four ranks: who trains at last; by rank, faults and before which step it dies; who leaves."""

    expected: tuple[int, ...]
    faults: Mapping[int, Fault] = {}
    dies_before: Mapping[int, int] = {}
    leaves: tuple[int, ...] = ()
    joins: bool = False


def train(folder: str, changes: Changes, options: Mapping[str, Any]) -> Story | None:
    """Until everybody is there who is expected, those that leave have left, and some steps more."""
    number = -1 if joins() else torch.distributed.get_rank()
    moments: dict[int, Moment] = {}
    with injected([changes.faults[number]] if number in changes.faults else []):
        model = make_model(NUMEL, {"topology": "complete", "min_ranks": 1} | dict(options))
        first = model.world.member  # type: ignore[attr-defined]
        target = targets(first, NUMEL)
        expected = changes.expected if number in changes.leaves else without(changes.expected, changes.leaves)
        with recorded(Path(folder) / str(first)):
            for last in steps_until(model, lambda: model.members == expected, NUM_MORE):
                if model.step == changes.dies_before.get(number):
                    os.kill(os.getpid(), signal.SIGKILL)
                if last is not None and number in changes.leaves and model.step == last - NUM_MORE // 2:
                    model.leave()
                    return Story(first, moments, 0.0)
                loss = model(target)
                moments[model.step] = moment_of(model)
                loss.backward()
            distance, _ = model.consensus_distance()
            story_told = Story(model.world.member, moments, distance)  # type: ignore[attr-defined]
            model.close()
    return story_told


def moment_of(model: Any) -> Moment:
    exchanges = model._engine.exchanges
    views = [exchanges.views(index)[0] for index in (1, 0)]  # buckets are in the reversed order of the parameters
    kept = {name: np.stack([view.kept[name].numpy().copy() for view in views]) for name in exchanges.algorithm.keeps}
    return Moment(model.members, np.stack([view.values.numpy().copy() for view in views]), kept)


class Outcome(NamedTuple):
    """The stories by member number, of those who ended only what they told; and whose messages each did not mix in."""

    stories: dict[int, Story]
    dropped: dict[int, Dropped]


def run(changes: Changes, **options: Any) -> Outcome:
    with (
        tempfile.TemporaryDirectory() as folder,
        unsupervised.started(train, folder, changes, options, world_size=4) as ranks,
    ):
        if changes.joins:
            ranks.join(train, folder, changes, options)
        told = [story for story in ranks.results() if story is not None]
        dropped = {int(file.name): read_dropped(file) for file in Path(folder).iterdir()}
    return Outcome({story.member: story for story in told}, dropped)


class Dense:
    """Ranks in numpy, an algorithm being a subclass: its parameters, its anchors and velocities, [ranks, 2, numel]."""

    period, before_forward = 4, True
    common: tuple[str, ...] = ("anchor", "velocity")
    own: tuple[str, ...] = ()

    def __init__(self, outcome: Outcome) -> None:
        num_ranks = max(4, 1 + max(outcome.stories))
        self.dropped = outcome.dropped
        self.goals = np.stack([targets(rank, NUMEL).numpy() for rank in range(num_ranks)])
        self.x = np.zeros_like(self.goals)
        self.kept = {name: np.zeros_like(self.x) for name in (*self.common, *self.own)}
        self.in_flight: list[tuple[int, dict[str, Array]]] = []  # parameter, difference by channel

    def follow(self, stories: Mapping[int, Story]) -> None:
        """Make all steps, and compare with what every rank had in each."""
        num_steps = 1 + max(max(story.moments) for story in stories.values())
        members: tuple[int, ...] = (0, 1, 2, 3)
        for step in range(num_steps):
            there = {member: story.moments[step] for member, story in stories.items() if step in story.moments}
            (now,) = {moment.members for moment in there.values()}
            if now != members:
                self.deliver()
                self.change([m for m in now if m in members], {m: there[m] for m in now if m not in members})
                members = now
            if self.before_forward:
                self.deliver()
            for member, moment in there.items():
                where = f"rank {member}, step {step}"
                np.testing.assert_allclose(moment.values, self.x[member], atol=1e-11, rtol=0, err_msg=where)
                for name, kept in self.kept.items():
                    told = f"{where}: {name}"
                    np.testing.assert_allclose(moment.kept[name], kept[member], atol=1e-11, rtol=0, err_msg=told)
            updates = -RATE * (self.x - self.goals)
            updates[[member for member in stories if member not in there]] = 0  # a rank that leaves makes empty steps
            self.deliver()
            self.x = self.x + updates
            if (step + 1) % self.period == 0:
                for parameter in range(2):
                    self.send(step, parameter, members)

    def matrix(self, step: int, world_size: int) -> Array:
        del step
        return np.full((world_size, world_size), 1 / world_size)

    def messages(self) -> dict[str, Array]:
        return {"values": self.x}

    def send(self, step: int, parameter: int, members: tuple[int, ...]) -> None:
        matrix = self.matrix(step, len(members))
        arriving = {}
        for channel, (name, sent) in enumerate(self.messages().items()):
            arriving[name] = difference = np.zeros((len(sent), NUMEL))
            bucket = 1 - parameter + channel * 2**16  # buckets are in the reversed order of the parameters
            for (i, member), (j, other) in itertools.product(enumerate(members), repeat=2):
                if other not in self.dropped.get(member, {}).get((step, bucket), ()):
                    difference[member] += matrix[i, j] * (sent[other, parameter] - sent[member, parameter])
        self.in_flight.append((parameter, arriving))

    def deliver(self) -> None:
        for parameter, arriving in self.in_flight:
            self.arrive(parameter, arriving)
        self.in_flight = []

    def arrive(self, p: int, got: dict[str, Array]) -> None:
        raise NotImplementedError

    def change(self, stay: list[int], join: Mapping[int, Moment]) -> None:
        """Common state becomes the mean of those that stay; one that joins has it, and its source's values and own."""
        for name in self.common:
            self.kept[name][:] = self.kept[name][stay].mean(0)
        for member, moment in join.items():
            self.x[member] = moment.values
            for name in self.own:
                self.kept[name][member] = moment.kept[name]


class DenseDiLoCo(Dense):
    def arrive(self, p: int, got: dict[str, Array]) -> None:
        anchor, velocity = self.kept["anchor"], self.kept["velocity"]
        delta = anchor[:, p] - self.x[:, p] - got["values"]
        velocity[:, p] = 0.9 * velocity[:, p] + delta
        anchor[:, p] -= 0.7 * (delta + 0.9 * velocity[:, p])
        self.x[:, p] = anchor[:, p]


class DenseNoLoCo(Dense):
    common, own = (), ("anchor", "velocity")

    def matrix(self, step: int, world_size: int) -> Array:
        return topologies.build("random_matching", world_size).round((step + 1) // self.period - 1).matrix()

    def messages(self) -> dict[str, Array]:
        return {"values": self.x, "anchor": self.kept["anchor"]}

    def arrive(self, p: int, got: dict[str, Array]) -> None:
        anchor, velocity = self.kept["anchor"], self.kept["velocity"]
        moved = self.x[:, p] + got["values"] - anchor[:, p] - got["anchor"]
        velocity[:, p] = 0.5 * velocity[:, p] + 0.7 * moved + got["anchor"]
        anchor[:, p] += velocity[:, p]
        self.x[:, p] = anchor[:, p]

"""What an algorithm keeps survives a change of ranks: common state stays equal on all, own state stays its rank's."""

import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import unsupervised
from algorithm_table import OUTER_ADAM
from elastic_ranks import RATE, Dropped, assert_repeated, dropped_of, joins, make_model, steps_until, targets, without
from fault_places import injected
from outer_recursions import adam
from tiers import rest_is_slow

import gossip
import topologies
from gossip.lab.faults.injection import Fault
from gossip.step.generation_change import agree_on_

NUMEL = 8
NUM_MORE = 16

Array = np.ndarray[Any, Any]


class Moment(NamedTuple):
    """A rank in one step: who trains, what its forward pass reads, [2, numel], and what it keeps, [2, numel] each."""

    members: tuple[int, ...]
    values: Array
    kept: dict[str, Array]


Story = dict[int, Moment]
"""What a rank tells: its moments by step."""


class Changes(NamedTuple):
    """What becomes of four ranks: who trains at last; by rank, faults and before which step it dies; who leaves."""

    expected: tuple[int, ...]
    faults: Mapping[int, Fault] = {}
    dies_before: Mapping[int, int] = {}
    leaves: tuple[int, ...] = ()
    joins: bool = False


def train(folder: str, changes: Changes, options: Mapping[str, Any]) -> tuple[int, Story]:
    """Until all are there who are expected, those that leave have left, and some steps more: the member, its story."""
    number = -1 if joins() else torch.distributed.get_rank()
    moments: Story = {}
    with injected([changes.faults[number]] if number in changes.faults else []):
        model = make_model(NUMEL, {"topology": "complete", "min_ranks": 1, "record": folder} | dict(options))
        first = model.world.member  # type: ignore[attr-defined]
        target = targets(first, NUMEL)
        expected = changes.expected if number in changes.leaves else without(changes.expected, changes.leaves)
        for last in steps_until(model, lambda: model.members == expected, NUM_MORE):
            if model.step == changes.dies_before.get(number):
                os.kill(os.getpid(), signal.SIGKILL)
            if last is not None and number in changes.leaves and model.step == last - NUM_MORE // 2:
                model.leave()
                return first, moments
            if model.algorithm.weighted:
                model.weigh(samples_of(first))
            loss = model(target)
            moments[model.step] = moment_of(model)
            loss.backward()
        model.consensus_distance()
        member = model.world.member  # type: ignore[attr-defined]
        model.close()
    return member, moments


def moment_of(model: Any) -> Moment:
    exchanges = model._engine.exchanges
    views = [exchanges.views(index)[0] for index in (1, 0)]  # buckets are in the reversed order of the parameters
    names = (*exchanges.algorithm.keeps, *exchanges.algorithm.counts)
    kept = {name: np.stack([(view.kept | view.numbers)[name].numpy().copy() for view in views]) for name in names}
    return Moment(model.members, np.stack([view.values.numpy().copy() for view in views]), kept)


class Outcome(NamedTuple):
    """The stories by member number, of those who ended only what they told; and whose messages each did not mix in."""

    stories: dict[int, Story]
    dropped: dict[int, Dropped]


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
        num_steps = 1 + max(map(max, stories.values()))
        members: tuple[int, ...] = (0, 1, 2, 3)
        for step in range(num_steps):
            there = {member: story[step] for member, story in stories.items() if step in story}
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


class DenseDiLoCoWithAdam(Dense):
    common = ("anchor", "outer_exp_avg", "outer_exp_avg_sq")
    counts = (0, 0)

    def arrive(self, p: int, got: dict[str, Array]) -> None:
        anchor, *moments = (self.kept[name][:, p] for name in self.common)
        delta = anchor - self.x[:, p] - got["values"]
        anchor[:], (count, *new) = adam(anchor, delta, (self.counts[p], *moments))
        self.counts = (count, self.counts[1]) if p == 0 else (self.counts[0], count)
        for moment, values in zip(moments, new, strict=True):
            moment[:] = values
        self.x[:, p] = anchor


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


class DenseDiLoCoAwc(DenseDiLoCo):
    before_forward = False


class Row(NamedTuple):
    """An algorithm; the recursion that it follows; whether forward passes read exact averages; its topology."""

    algorithm: gossip.Algorithm
    dense: type[Dense] | None = None
    is_exact: bool = False
    topology: str = "complete"
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=RATE)


ROWS = {
    "diloco": Row(gossip.DiLoCo(period=4), DenseDiLoCo, is_exact=True),
    "diloco(awc)": Row(gossip.DiLoCo(period=4, form="awc"), DenseDiLoCoAwc),
    "diloco(outer)": Row(gossip.DiLoCo(period=4, outer=OUTER_ADAM), DenseDiLoCoWithAdam, is_exact=True),
    "streaming_diloco": Row(gossip.StreamingDiLoCo(period=4, parts=2, overlap=2)),
    "sparse_loco": Row(gossip.SparseLoCo(period=4, ratio=0.5, bits=4), is_exact=True),
    "noloco": Row(gossip.NoLoCo(period=4), DenseNoLoCo, topology="random_matching"),
    "factored_gossip": Row(gossip.FactoredGossip(period=4, kappa=0.4), topology="ring"),
    "gasloc": Row(gossip.GASLoC(period=4), topology="ring"),
    "slowmo": Row(gossip.SlowMo(period=4, slow_lr=0.7), topology="ring"),
    "gossip_pga": Row(gossip.GossipPGA(period=4, form="atc"), is_exact=True, topology="ring"),
}
OTHERS = {
    "adam_tracking": Row(gossip.AdamTracking(), topology="ring", optimizer=partial(torch.optim.Adam, lr=RATE)),
    "decentlam": Row(gossip.DecentLaM(beta=0.5), topology="ring"),
    "desloc": Row(gossip.DESLOC(period=2), topology="ring", optimizer=partial(torch.optim.Adam, lr=RATE)),
    "gradient_tracking": Row(gossip.GradientTracking(), topology="ring"),
    "integral_correction": Row(gossip.IntegralCorrection(), topology="ring"),
    "momentum_tracking": Row(gossip.MomentumTracking(), topology="ring"),
    "push_sum": Row(gossip.PushSum(), topology="ring"),
    "push_sum(weighted)": Row(gossip.PushSum(weighted=True), topology="ring"),
    "diloco(weighted)": Row(gossip.DiLoCo(period=4, weighted=True)),
    "quasi_global_integral": Row(gossip.QuasiGlobalIntegral(beta=0.5), topology="ring"),
    "quasi_global_momentum": Row(gossip.QuasiGlobalMomentum(), topology="ring"),
    "relay_sum": Row(gossip.RelaySum(), topology="path"),
}

DEATHS = {
    "in mid-period": Changes((0, 1, 3), dies_before={2: 6}),
    "before it sends": Changes((0, 1, 3), faults={2: Fault(step=7)}),
    "between two buckets": Changes((0, 1, 3), faults={2: Fault(step=7, bucket=1)}),
    "within a message": Changes((0, 1, 3), faults={2: Fault(step=7, bucket=1, num_bytes=40)}),
    "after it has sent": Changes((0, 1, 3), dies_before={2: 8}),
    "of all but one": Changes((1,), dies_before={0: 6, 2: 6, 3: 6}),
}
CASES = [("diloco", death) for death in DEATHS] + [
    (name, death) for name in list(ROWS)[1:] for death in ("in mid-period", "before it sends")
]


def outcome_of(row: Row, changes: Changes, **options: Any) -> Outcome:
    algorithm = row.algorithm
    options |= {"algorithm": algorithm, "topology": row.topology, "optimizer": row.optimizer}
    with (
        tempfile.TemporaryDirectory() as folder,
        unsupervised.started(train, folder, changes, options, world_size=4) as ranks,
    ):
        if changes.joins:
            ranks.join(train, folder, changes, options)
        told = [story for story in ranks.results() if story is not None]
        recording = gossip.Recording.load(folder)
    if algorithm.compression is None and not algorithm.requires.tree:
        stories = {member: {step: moment.values for step, moment in story.items()} for member, story in told}
        weigh = samples_of if algorithm.weighted else None
        frozen = [rank for rank, fault in changes.faults.items() if fault.kind == "freeze"]
        returned = dict(enumerate(frozen, start=4))
        assert_repeated(recording, stories, NUMEL, weigh=weigh, returned=returned, **options)
    return Outcome(dict(told), dropped_of(recording))


def samples_of(member: int) -> int:
    return 1 + member % 3


def common_of(algorithm: gossip.Algorithm) -> list[str]:
    """What is equal on all ranks by definition; all counts are, of those here that have such state."""
    return [*(name for name, how in algorithm.keeps.items() if how.scope == "common"), *algorithm.counts]


def assert_are_alike(outcome: Outcome, row: Row) -> None:
    """Common state is: to the bit when a generation begins, later to rounding; and replicas after an exact exchange."""
    steps = sorted(set.intersection(*(set(story) for story in outcome.stories.values())))
    by_step = [[story[step] for story in outcome.stories.values()] for step in steps]
    begins = next(k for k, moments in enumerate(by_step) if moments[0].members != by_step[0][0].members)
    for name in common_of(row.algorithm):
        assert all(np.array_equal(moment.kept[name], by_step[begins][0].kept[name]) for moment in by_step[begins])
        for moments in by_step[begins:]:
            assert np.ptp([moment.kept[name] for moment in moments], axis=0).max() < 1e-12
    if row.is_exact:
        assert min(np.ptp([moment.values for moment in moments], axis=0).max() for moments in by_step[-8:]) < 1e-12


class OneOther:
    """The world of rank 0, seen by it: rank 1 has threes, and is lost before a turn."""

    member, members = 0, (0, 1)

    def __init__(self, lost_before: int) -> None:
        self._lost_before = lost_before

    def exchange(self, _: object, what: str, *__: object, turn: int, num_bytes: Any = None) -> dict[int, Any]:
        if turn >= self._lost_before:
            raise gossip.errors.GenerationEndedError(what)
        if turn == 1:
            return {1: torch.tensor([False])}
        return {1: torch.full((num_bytes[1] // 8,), 3.0 if turn % 2 == 0 else 2.0, dtype=torch.float64)}


@pytest.mark.parametrize("lost_before", range(1, 7))
def test_common_state_is_agreed_as_a_whole_or_not_at_all(lost_before: int) -> None:
    tensors = [torch.ones(4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    is_agreed = agree_on_(cast(Any, OneOther(lost_before)), tensors, is_joining=False)
    assert is_agreed == (lost_before == 6)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, 2.0 if is_agreed else 1.0))


@pytest.mark.parametrize(("name", "death"), rest_is_slow(CASES, 2))
def test_after_a_death(name: str, death: str) -> None:
    row = ROWS[name]
    outcome = outcome_of(row, DEATHS[death])
    assert set(outcome.stories) == set(DEATHS[death].expected)
    assert_are_alike(outcome, row)
    if row.dense is not None:
        row.dense(outcome).follow(outcome.stories)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_no_jump_after_a_death_and_a_join(name: str) -> None:
    """No rank's parameters jump when the ranks change, and those who are left come closer to their optimum."""
    stories = outcome_of(OTHERS[name], Changes((0, 1, 3, 4), dies_before={2: 6}, joins=True)).stories
    for story in stories.values():
        values = np.stack([moment.values for _, moment in sorted(story.items())])
        moves = np.abs(np.diff(values, axis=0)).max((1, 2))
        assert moves.max() <= 5 * moves[:4].max()
    members = max(stories[min(stories)].items())[1].members
    weights = [samples_of(member) if OTHERS[name].algorithm.weighted else 1 for member in members]
    optimum = np.average([targets(member, NUMEL).numpy() for member in members], axis=0, weights=weights)
    left = np.mean([max(stories[member].items())[1].values for member in members], axis=0)
    assert np.linalg.norm(left - optimum) < 0.5 * np.linalg.norm(optimum)


@pytest.mark.parametrize("name", rest_is_slow(ROWS))
def test_while_one_joins_and_one_leaves(name: str) -> None:
    row = ROWS[name]
    outcome = outcome_of(row, Changes((0, 1, 2, 3, 4), joins=True, leaves=(1,)))
    assert set(outcome.stories) == {0, 1, 2, 3, 4}
    joining_rank, others = outcome.stories[4], [outcome.stories[member] for member in (0, 2, 3)]
    assert others[0][max(joining_rank)].members == (0, 2, 3, 4)
    first = min(joining_rank)
    for state in common_of(row.algorithm):
        assert all(np.array_equal(joining_rank[first].kept[state], o[first].kept[state]) for o in others)
    if row.dense is not None:
        row.dense(outcome).follow(outcome.stories)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "noloco", "slowmo"])
def test_one_that_was_frozen_comes_back(name: str) -> None:
    row = ROWS[name]
    frozen = Changes((0, 2, 3, 4), faults={1: Fault("freeze", step=7, duration_s=3.0)})
    outcome = outcome_of(row, frozen, timeout=timedelta(seconds=1), partition_timeout=30)
    assert set(outcome.stories) == {0, 2, 3, 4}
    assert_are_alike(outcome, row)

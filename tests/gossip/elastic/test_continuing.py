"""Ranks end at any place, and the others go on, as the dense recursion of those that are left does."""

from __future__ import annotations

import itertools
import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import unsupervised
from mortal_ranks import RATE, Course, Dropped, read_dropped, targets, train

import gossip
import topologies
from gossip import ExchangeError
from gossip.lab.faults.fault import Fault

NUM_STEPS = 25
NUMEL = 64


class Outcome(NamedTuple):
    """What became of all ranks.

    Attributes
    ----------
    courses : list of Course or None
        What they tell; None for those that ended.
    dropped : list of dict
        Whose messages each did not mix in.
    """

    courses: list[Course | None]
    dropped: list[Dropped]

    @property
    def left(self) -> list[Course]:
        return [course for course in self.courses if course is not None]


def run(
    deaths: dict[int, Fault], world_size: int = 4, numel: int = NUMEL, num_steps: int = NUM_STEPS, **options: Any
) -> Outcome:
    frozen = {rank for rank, death in deaths.items() if death.kind == "freeze"}
    with (
        tempfile.TemporaryDirectory() as folder,
        unsupervised.started(train, folder, numel, num_steps, deaths, options, world_size=world_size) as ranks,
    ):
        courses: list[Course | None] = ranks.results(silent=frozen)
        dropped = [read_dropped(Path(folder) / str(rank)) for rank in range(world_size)]
    assert [rank for rank, course in enumerate(courses) if course is None] == sorted(deaths)
    return Outcome(courses, dropped)


def dense(outcome: Outcome, topology: str, num_steps: int) -> list[np.ndarray]:
    """The recursion along each generation's topology, without what was not mixed in, [n, 2, numel] by step."""
    generations, numel = outcome.left[0].generations, outcome.left[0].values[0].shape[1]
    goals = np.stack([targets(rank, numel).numpy() for rank in range(len(outcome.courses))])
    x = differences = np.zeros_like(goals)
    by_step = []
    for step in range(num_steps + 1):
        if any(first == step for first, _ in generations[1:]):
            x, differences = x + differences, np.zeros_like(x)
        by_step.append(x)
        x = x + differences - RATE * (x - goals)
        members = next(members for first, members in reversed(generations) if first <= step)
        matrix = topologies.build(topology, len(members)).round(step).matrix()
        differences = np.zeros_like(x)
        for (i, member), (j, other), parameter in itertools.product(enumerate(members), enumerate(members), range(2)):
            # Buckets are in the reversed order of the parameters.
            if i != j and other not in outcome.dropped[member].get((step, 1 - parameter), ()):
                differences[member, parameter] += matrix[i, j] * (x[other, parameter] - x[member, parameter])
    return by_step


def assert_follow_the_recursion(outcome: Outcome, topology: str, num_steps: int = NUM_STEPS) -> None:
    assert_are_together(outcome)
    expected = dense(outcome, topology, num_steps)
    for rank, course in enumerate(outcome.courses):
        for step, values in enumerate(course.values[:-1] if course is not None else ()):
            np.testing.assert_allclose(values, expected[step][rank], atol=1e-11, err_msg=f"rank {rank}, step {step}")


def assert_are_together(outcome: Outcome) -> None:
    """Those left have the same generations, the last one without those who ended, and the mean of what they had."""
    left = outcome.left
    assert len({tuple(course.generations) for course in left}) == 1
    assert set(left[0].generations[-1][1]) == {
        rank for rank, course in enumerate(outcome.courses) if course is not None
    }
    mean = np.mean([course.values[-2] for course in left], axis=0)
    for course in left:
        np.testing.assert_allclose(course.values[-1], mean, atol=1e-12)


@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
@pytest.mark.parametrize(
    "death", [Fault(step=5), Fault(step=5, bucket=1), Fault(step=5, bucket=1, num_bytes=40), Fault()]
)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_as_the_dense_recursion_does(topology: str, death: Fault, victim: int) -> None:
    assert_follow_the_recursion(run({victim: death}, topology=topology), topology)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 2**20, 8 * 2**19])
def test_a_message_that_was_sent_in_part_is_never_mixed_in(num_bytes: int) -> None:
    outcome = run({1: Fault(step=3, bucket=1, num_bytes=num_bytes)}, numel=2**19, num_steps=8, topology="ring")
    assert_follow_the_recursion(outcome, "ring", 8)


@pytest.mark.parametrize("steps", [(5, 5), (5, 6), (5, 12)])
def test_two_ranks_end(steps: tuple[int, int]) -> None:
    outcome = run({0: Fault(step=steps[0]), 3: Fault(step=steps[1])}, world_size=6, topology="ring")
    assert_follow_the_recursion(outcome, "ring")


def test_a_second_rank_ends_while_the_others_agree_on_who_is_left() -> None:
    outcome = run({4: Fault(step=5), 1: Fault(place="agreeing")}, world_size=6, topology="one_peer_exponential")
    assert_follow_the_recursion(outcome, "one_peer_exponential")


IN_CONSTRUCTION = [
    Fault(place="listening"),
    Fault(place="calling"),
    *(Fault(place="together", step=number) for number in range(4)),
]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("death", IN_CONSTRUCTION)
def test_a_rank_ends_while_all_construct_the_model(death: Fault, victim: int) -> None:
    assert_are_together(run({victim: death}, topology="ring"))


@pytest.mark.parametrize("number", range(5, 13))
def test_a_rank_ends_in_the_global_average(number: int) -> None:
    outcome = run({2: Fault(place="together", step=number)}, topology="ring", num_steps=3)
    before = dense(outcome, "ring", 3)[-1]
    means = [before[[0, 1, 3]].mean(0), before.mean(0)]  # the latter if all had it before that rank ended
    found = [course.values[-1] for course in outcome.left]
    assert all(torch.equal(values, found[0]) for values in found)
    assert any(np.allclose(found[0], mean, rtol=0, atol=1e-12) for mean in means)


def test_a_rank_that_is_frozen_is_given_up_after_the_time_out() -> None:
    death = Fault(step=5, kind="freeze")
    outcome = run({1: death}, topology="ring", timeout=timedelta(seconds=2))
    assert_follow_the_recursion(outcome, "ring")
    reasons = {course.lost[1] for course in outcome.left}
    assert any(re.fullmatch(r"step \d+, bucket \d: rank [02] waited 2(\.\d+)? s for it", text) for text in reasons)


def train_or_be_given_up(*arguments: Any) -> Course | str:
    try:
        return train(*arguments)
    except ExchangeError as error:
        return str(error)


def test_a_message_that_is_lost_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    options = {"topology": "ring", "timeout": timedelta(seconds=3)}
    faults = {1: Fault("lose", step=5, peers=(2,))}
    arguments = str(tmp_path), NUMEL, NUM_STEPS, faults, options
    with unsupervised.started(train_or_be_given_up, *arguments, world_size=4) as ranks:
        results = ranks.results()
    left = [course for course in results if isinstance(course, Course)]
    assert len(left) == 3, "one of the two that cannot hear each other"
    assert all("continued without this rank" in text for text in results if isinstance(text, str))
    for course in left[1:]:
        torch.testing.assert_close(course.values[-1], left[0].values[-1], rtol=0, atol=0)


COMBINATIONS = [
    ({"compression": "int8"}, "ring"),
    ({"compression": "int4"}, "one_peer_exponential"),
    ({"compression": "bf16"}, "ring"),
    ({"compression": "choco"}, "ring"),
    ({"compression": "powergossip"}, "ring"),
    ({"algorithm": "adapt_then_combine"}, "one_peer_exponential"),
    ({"algorithm": "gradient_tracking"}, "ring"),
    ({"algorithm": "push_sum"}, "one_peer_exponential"),
    ({"step_in_backward": False}, "ring"),
    ({"clip_grad_norm": 100.0}, "ring"),
]


@pytest.mark.parametrize(("options", "topology"), COMBINATIONS, ids=str)
def test_those_who_are_left_reach_the_optimum_of_their_own_data(options: dict[str, Any], topology: str) -> None:
    outcome = run({2: Fault(step=9, bucket=1, num_bytes=40)}, num_steps=250, topology=topology, **options)
    assert_are_together(outcome)
    optimum = np.mean([targets(rank, NUMEL).numpy() for rank in (0, 1, 3)], axis=0)
    for course in outcome.left:
        np.testing.assert_allclose(course.values[-1], optimum, atol=1e-4 if "compression" in options else 1e-9)


@pytest.mark.parametrize("form", ["awc", "atc"])
def test_the_corrections_of_those_who_are_left_cancel_each_other(form: str) -> None:
    algorithm = gossip.algorithms.IntegralCorrection(form=form)
    outcome = run({2: Fault(step=60)}, num_steps=400, topology="ring", algorithm=algorithm)
    optimum = np.mean([targets(rank, NUMEL).numpy() for rank in (0, 1, 3)], axis=0)
    for course in outcome.left:
        np.testing.assert_allclose(course.values[-2], optimum, atol=1e-6)


def random_deaths(seed: int) -> tuple[int, str, dict[int, Fault]]:
    """Number of ranks, topology, and one rank, or now and then two, that end somewhere: half of them in mid-message."""
    random = np.random.default_rng(seed)
    world_size = int(random.integers(4, 9))
    topology = str(random.choice(["ring", "one_peer_exponential", "complete", "base", "exponential"]))
    victims = random.permutation(world_size)[: 1 + (random.random() < 0.25)]
    return (
        world_size,
        topology,
        {
            int(victim): Fault(
                step=int(random.integers(0, 12)),
                bucket=int(random.integers(0, 2)),
                num_bytes=int(random.integers(0, 8 * 2**16)) if random.random() < 0.5 else None,
            )
            for victim in victims
        },
    )


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_end_anywhere(seed: int, shares_memory: bool) -> None:
    world_size, topology, deaths = random_deaths(seed)
    options = {"topology": topology, "min_ranks": 2, "shares_memory": shares_memory}
    outcome = run(deaths, world_size, numel=2**16, num_steps=16, **options)
    assert_follow_the_recursion(outcome, topology, 16)


@pytest.mark.parametrize(
    "options",
    [
        {"topology": "ring"},
        {"topology": "one_peer_exponential", "algorithm": "adapt_then_combine"},
        {"topology": "ring", "compression": "bf16"},
        {"topology": "ring", "compression": "int8"},
        {"topology": "one_peer_exponential", "compression": "int4"},
        {"topology": "ring", "compression": "choco"},
        {"topology": "ring", "compression": "powergossip"},
        {"topology": "ring", "algorithm": "gradient_tracking"},
        {"topology": "one_peer_exponential", "algorithm": "push_sum"},
        {"topology": "ring", "step_in_backward": False},
    ],
    ids=str,
)
def test_what_lies_in_shared_memory_is_what_comes_over_sockets(options: dict[str, Any]) -> None:
    numel = 2**17  # also in 4 bits enough to be shared
    shared, sent = (
        run({}, 4, numel, 6, shares_memory=shares_memory, **options).left for shares_memory in (True, False)
    )
    for one, other in zip(shared, sent, strict=True):
        assert all(torch.equal(*values) for values in zip(one.values, other.values, strict=True))


def train_until_too_few_are_left(folder: str, deaths: dict[int, Fault]) -> str:
    with pytest.raises(ExchangeError) as caught:
        train(folder, NUMEL, NUM_STEPS, deaths, {"topology": "ring"})
    return str(caught.value)


def test_with_too_few_ranks_left_the_training_ends_and_says_who_is_missing(tmp_path: Path) -> None:
    deaths = {0: Fault(step=3), 1: Fault(step=3)}
    with unsupervised.started(train_until_too_few_are_left, str(tmp_path), deaths, world_size=4) as ranks:
        texts = ranks.results()
    for rank in (2, 3):
        assert texts[rank].startswith(
            f"rank {rank}: 2 of 4 ranks remain (ranks 2, 3), fewer than min_ranks=3; missing: rank 0: "
        )


def test_a_size_that_the_topology_cannot_serve_is_served_by_another() -> None:
    outcome = run({1: Fault(step=5)}, topology="hypercube")
    assert_are_together(outcome)
    outcome = run({1: Fault(step=5)}, topology="hypercube", fallback_topology="star")
    assert_are_together(outcome)

"""Ranks end at any place, and the others go on, as the dense recursion of those that are left does."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import unsupervised
from elastic_ranks import Stay, assert_agree, assert_follow_the_recursion, dense, run, stay, targets
from tiers import rest_is_slow

from gossip import ExchangeError
from gossip.elastic.repeated_operations import RepeatedOperations
from gossip.lab.faults.injection import Fault

NUM_STEPS = 25
NUMEL = 64


@pytest.mark.parametrize(
    ("victim", "death", "topology"),
    rest_is_slow(
        [
            (0, Fault(step=5, bucket=1, num_bytes=40), "one_peer_exponential"),
            (2, Fault(step=5), "ring"),
            (0, Fault(), "ring"),
        ]
    ),
)
def test_the_others_go_on_as_the_dense_recursion_does(topology: str, death: Fault, victim: int) -> None:
    assert_follow_the_recursion(run(NUM_STEPS, ends={victim: death}, topology=topology), topology)


@pytest.mark.slow
def test_a_large_message_that_was_sent_in_part_is_never_mixed_in() -> None:
    ends = {1: Fault(step=3, bucket=1, num_bytes=2**20)}
    assert_follow_the_recursion(run(8, ends=ends, numel=2**19, topology="ring"), "ring")


@pytest.mark.slow
def test_a_second_rank_ends_while_the_others_agree_on_who_is_left_without_the_first() -> None:
    ends = {4: Fault(step=5), 1: Fault(place="agreeing")}
    outcome = run(NUM_STEPS, ends=ends, world_size=6, topology="one_peer_exponential")
    assert_follow_the_recursion(outcome, "one_peer_exponential")


@pytest.mark.slow
def test_a_rank_ends_while_all_construct_the_model() -> None:
    assert_agree(run(NUM_STEPS, ends={2: Fault(place="calling")}, topology="ring"))


@pytest.mark.slow
def test_a_rank_ends_in_the_global_average() -> None:
    outcome = run(3, ends={2: Fault(place="together", step=8)}, topology="ring")
    before = np.stack(list(dense(outcome, "ring")[-1].values()))
    means = [before[[0, 1, 3]].mean(0), before.mean(0)]  # the latter if all had it before that rank ended
    found = [one.values[-1] for one in outcome.stays.values()]
    assert all(torch.equal(values, found[0]) for values in found)
    assert any(np.allclose(found[0], mean, rtol=0, atol=1e-12) for mean in means)


@pytest.mark.slow
def test_a_rank_that_is_frozen_is_given_up_after_the_time_out() -> None:
    death = Fault(step=5, kind="freeze")
    outcome = run(NUM_STEPS, ends={1: death}, topology="ring", timeout=timedelta(seconds=5))
    assert_follow_the_recursion(outcome, "ring")
    reasons = {one.lost[1] for one in outcome.stays.values()}
    assert any(re.fullmatch(r"step \d+, bucket \d: rank [02] waited 5(\.\d+)? s for it", text) for text in reasons)


def stay_or_be_given_up(*arguments: Any) -> Stay | str:
    try:
        return stay(*arguments)
    except ExchangeError as error:
        return str(error)


@pytest.mark.slow
def test_a_message_that_is_lost_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    options = {"topology": "ring", "timeout": timedelta(seconds=3)}
    faults = {1: Fault("lose", step=5, peers=(2,))}
    arguments = str(tmp_path), NUMEL, NUM_STEPS, faults, (), options
    results = unsupervised.results_of(stay_or_be_given_up, *arguments, world_size=4)
    left = [one for one in results if isinstance(one, Stay)]
    assert len(left) == 3, "one of the two that cannot hear each other"
    assert all("continued without this rank" in text for text in results if isinstance(text, str))
    for one in left[1:]:
        torch.testing.assert_close(one.values[-1], left[0].values[-1], rtol=0, atol=0)


@pytest.mark.slow
def test_with_too_few_ranks_left_the_training_ends_and_says_who_is_missing(tmp_path: Path) -> None:
    deaths = {0: Fault(step=3), 1: Fault(step=3)}
    arguments = str(tmp_path), NUMEL, NUM_STEPS, deaths, (), {"topology": "ring"}
    texts = unsupervised.results_of(stay_or_be_given_up, *arguments, world_size=4)
    for rank in (2, 3):
        assert texts[rank].startswith(
            f"rank {rank}: 2 of 4 ranks remain (ranks 2, 3), fewer than min_ranks=3; missing: rank 0: "
        )


COMPRESSED: dict[str, Any] = {"compression": "choco", "topology": "ring"}


@pytest.mark.slow
def test_those_who_are_left_reach_the_optimum_of_their_own_data() -> None:
    outcome = run(250, ends={2: Fault(step=9, bucket=1, num_bytes=40)}, **COMPRESSED)
    assert_agree(outcome)
    optimum = np.mean([targets(rank, NUMEL).numpy() for rank in (0, 1, 3)], axis=0)
    for one in outcome.stays.values():
        np.testing.assert_allclose(one.values[-1], optimum, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", [True, False])
def test_ranks_end_anywhere(shares_memory: bool) -> None:
    """One rank, or now and then two: half of them in mid-message."""
    random = np.random.default_rng(int(shares_memory))
    world_size = int(random.integers(4, 9))
    topology = str(random.choice(["ring", "one_peer_exponential", "complete", "base", "exponential"]))
    victims = random.permutation(world_size)[: 1 + (random.random() < 0.25)]
    deaths = {
        int(victim): Fault(
            step=int(random.integers(0, 12)),
            bucket=int(random.integers(0, 2)),
            num_bytes=int(random.integers(0, 8 * 2**16)) if random.random() < 0.5 else None,
        )
        for victim in victims
    }
    options = {"topology": topology, "min_ranks": 2, "shares_memory": shares_memory}
    outcome = run(16, ends=deaths, world_size=world_size, numel=2**16, **options)
    assert_follow_the_recursion(outcome, topology)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"topology": "ring"}, COMPRESSED])
def test_what_lies_in_shared_memory_is_what_comes_over_sockets(options: dict[str, Any]) -> None:
    numel = 2**17  # also in 4 bits enough to be shared
    shared, sent = (run(6, numel=numel, shares_memory=shares_memory, **options) for shares_memory in (True, False))
    for member, one in shared.stays.items():
        assert all(map(torch.equal, one.values, sent.stays[member].values))


def test_a_size_that_the_topology_cannot_serve_is_served_by_another() -> None:
    assert_agree(run(NUM_STEPS, ends={1: Fault(step=5)}, topology="hypercube", fallback_topology="star"))


def test_a_sum_that_is_repeated_counts_every_rank_once() -> None:
    """Here an attempt completes, but is not known to have: it is undone, and made again."""
    world = mock.Mock(is_alone=False, is_joint=False, world_size=2, member=0, _members=(0, 1), _others=[1])
    ten = torch.full((2,), 10.0)

    def exchange(sent: Any, _: str, **__: Any) -> Any:
        world.sent.append(sent[1].clone())
        is_total = len(world.sent) % 2 == 0
        return {1: (world.sent[-2] + ten if is_total else ten).view(torch.uint8)}

    world.sent, world.exchange = [], exchange
    world.collectively = lambda operation, undo: (operation(), undo(), operation())
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    RepeatedOperations.sum_(world, values, "adding up")
    assert values.tolist() == [11.0, 12.0, 13.0, 14.0]

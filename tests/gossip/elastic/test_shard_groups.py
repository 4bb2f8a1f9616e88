"""Shard groups continue without those that lose a rank, as the dense recursion of the groups that are left does."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import RATE, assert_follow_the_recursion, flat, make_model, run, targets
from tiers import rest_is_slow

from gossip.exchange.edge_transport import EdgeTransport
from gossip.exchange.transport import LateDifference
from gossip.lab.faults.injection import Fault

NUM_STEPS = 12


ENDS = [
    ("optimizer", {3: Fault(step=5, bucket=1)}),
    ("optimizer", {4: Fault(place="gathering", step=9)}),
    ("fsdp", {3: Fault(place="gathering", step=8)}),
    ("fsdp", {2: Fault(place="summing", step=9)}),
    ("none", {6: Fault(step=5), 5: Fault(place="agreeing")}),
]


@pytest.mark.parametrize(("shard", "ends"), rest_is_slow(ENDS))
def test_the_other_groups_go_on_as_the_dense_recursion_does(shard: str, ends: dict[int, Fault]) -> None:
    shape = (3 + len(ends) - 1, 2)
    outcome = run(NUM_STEPS, ends=ends, world_size=2 * shape[0], shape=shape, shard=shard, topology="ring", min_ranks=2)
    assert_follow_the_recursion(outcome, "ring")


class OfMatrices(torch.optim.SGD):
    """SGD that refuses stacks, as Muon does, so that parameters are dealt to the ranks of a group whole."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if any(parameter.ndim > 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("this is no matrix")
        super().step(closure)


@pytest.mark.parametrize("shard", rest_is_slow(["fsdp", "optimizer", "none"]))
def test_a_group_takes_the_place_of_one_that_was_lost(shard: str) -> None:
    ends = {3: Fault(step=5, bucket=1)}
    options = {"world_size": 6, "shape": (3, 2), "shard": shard, "topology": "ring"}
    outcome = run((0, 2, 3), ends=ends, num_joining=1, **options)
    assert_follow_the_recursion(outcome, "ring")
    assert {member for member, one in outcome.stays.items() if one.came is not None} == {6, 7}


@pytest.mark.parametrize(
    "options", rest_is_slow([{"shard": "optimizer", "optimizer": partial(OfMatrices, lr=RATE)}, {"shard": "none"}])
)
def test_a_group_leaves_together_and_another_comes(options: dict[str, Any]) -> None:
    outcome = run((0, 1, 2, 3), leaves=(1,), num_joining=1, world_size=6, shape=(3, 2), topology="ring", **options)
    assert_follow_the_recursion(outcome, "ring")
    assert {member for member, one in outcome.stays.items() if one.came is not None} == {6, 7}


def add_late(shard: str) -> float:
    """By how much what is combined between steps has changed a value of the replica after the next step."""
    options = {"shape": (2, 2), "shard": shard, "topology": "ring", "soft_deadline": 60.0}
    with make_model(8, options | {"optimizer": partial(torch.optim.SGD, lr=0.0)}) as model:
        late = iter([LateDifference(0, torch.ones(4, dtype=torch.float64))])

        def arrived(_: EdgeTransport, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
            return late if waits and bucket == 0 else iter(())

        model(targets(0, 8)).backward()
        with mock.patch.object(EdgeTransport, "late", arrived):
            model.consensus_distance()
        model(targets(0, 8)).backward()
        return float(flat(model.module).mean())


@pytest.mark.parametrize("shard", rest_is_slow(["fsdp", "optimizer"]))
def test_what_arrives_between_steps_is_kept(shard: str) -> None:
    """By both groups, in one of two parameters."""
    assert unsupervised.results_of(add_late, shard, world_size=4) == [0.5] * 4


def train_until_told(told: int) -> tuple[str, int]:
    model = make_model(8, {"shape": (3, 2), "shard": "fsdp", "topology": "ring"})
    try:
        while model.step < 30:
            if model.step == 5 and dist.get_rank() == told:
                os.kill(os.getpid(), signal.SIGTERM)
            model(targets(model.world.worker, 8)).backward()
            if model.step % 2 == 0:
                model.consensus_distance()
    except SystemExit as end:
        return f"exit {end.code}", model.step
    members = model.members
    model.close()
    return f"groups {members}", model.step


def test_a_group_leaves_when_one_of_its_ranks_receives_sigterm() -> None:
    results = unsupervised.results_of(train_until_told, 3, world_size=6)
    assert results[0] == results[1] == results[4] == results[5] == ("groups (0, 2)", 30)
    assert results[2] == results[3]
    assert results[2][0] == "exit 143"
    assert results[2][1] < 12

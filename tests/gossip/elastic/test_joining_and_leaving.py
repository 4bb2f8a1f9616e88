"""Ranks join a training that is under way, and leave it, as the dense recursion of those who train does."""

import functools
import math
import os
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import elastic_ranks
import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import (
    assert_agree,
    assert_follow_the_recursion,
    flat,
    joins,
    make_model,
    make_steps,
    run,
    stay,
    steps_until,
    targets,
    train_until,
)
from ranks import error_of, on_ranks
from tiers import rest_is_slow

import gossip
from gossip import GossipError, LaunchError, ManifestError
from gossip.elastic.joining_rank import JoiningRank
from gossip.elastic.state_transfer import step_of
from gossip.lab.faults.injection import Fault

NUMEL = 64


@pytest.mark.slow
def test_parameters_and_optimizer_state_are_those_of_their_source() -> None:
    """They are given in several pieces."""
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    outcome = run((0, 1, 2, 3), world_size=3, num_joining=1, numel=2**18 + 1, topology="ring", optimizer=momentum)
    assert_agree(outcome)
    assert outcome.stays[3].digests[0] != outcome.stays[3].digests[1]


@pytest.mark.slow
def test_one_that_ends_while_it_joins_leaves_the_others_alone() -> None:
    # The one that ended was member 3; the next one is member 4.
    outcome = run((0, 1, 2, 4), world_size=3, num_joining=1, doomed=Fault(place="entering"), topology="ring")
    if any(3 in members for _, members in outcome.stays[0].generations):
        assert_agree(outcome)  # it was let in, and only it could tell what it brought
    else:
        assert_follow_the_recursion(outcome, "ring")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["giving", "given"])
def test_if_the_source_of_a_state_ends_another_one_gives_it(place: str) -> None:
    # Member 3 of three ranks asks rank 0 first.
    ends = {0: Fault(place=place)}
    outcome = run((1, 2, 3), world_size=3, num_joining=1, ends=ends, topology="ring", min_ranks=2)
    assert outcome.stays[3].came[0] != 0
    assert_follow_the_recursion(outcome, "ring")


@pytest.mark.parametrize(("leaver", "is_told"), rest_is_slow([(2, True), (3, False)]))
def test_a_rank_that_leaves_loses_nothing(leaver: int, is_told: bool) -> None:
    outcome = run((0, 1, 2, 3), world_size=3, num_joining=1, leaves=(leaver,), topology="ring", is_told=is_told)
    assert_follow_the_recursion(outcome, "ring")
    assert not any(outcome.dropped.values())
    assert outcome.stays[3].first_step > 0
    others = [one for member, one in outcome.stays.items() if member != leaver]
    assert all(one.generations[-1][1] == tuple(sorted({0, 1, 2, 3} - {leaver})) for one in others)


COMBINATIONS: list[dict[str, Any]] = [
    {"compression": "choco"},
    {"step_in_backward": True, "clip_grad_norm": 100.0},
    {"buffers": "average"},
]


@pytest.mark.parametrize("options", rest_is_slow(COMBINATIONS))
def test_what_has_a_state_goes_on_with_one_more(options: dict[str, Any]) -> None:
    assert_agree(run((0, 1, 2, 3), world_size=3, num_joining=1, topology="ring", **options))


# ---------------------------------------------------------------------- what all ranks do together


def wait_longer_than_the_timeout(frozen: int) -> tuple[int, ...]:
    """Rank ``frozen`` stops when the others wait for it, and the joining rank, in its first step, for these others."""
    model = make_model(NUMEL, {"topology": "complete", "timeout": timedelta(seconds=2), "min_ranks": 1})
    has_waited = joins()
    for last in steps_until(model, lambda: len(model.members) == 4, num_more=4):
        if last is not None and not has_waited:
            has_waited = True
            if model.world.member == frozen:
                os.kill(os.getpid(), signal.SIGSTOP)
            model.consensus_distance()
        model(targets(model.world.member, NUMEL)).backward()
    members = model.members
    model.global_avg()
    model.close()
    return members


@pytest.mark.slow
def test_one_that_joins_drops_nobody_who_waits_together_with_others() -> None:
    told = unsupervised.results_of(wait_longer_than_the_timeout, 2, world_size=3, num_joining=1, silent=(2,))
    assert told == [(0, 1, 3), (0, 1, 3), None, (0, 1, 3)]


def measure_and_save_after_each_step(folder: str) -> tuple[int, list[tuple[int, ...]], int, torch.Tensor]:
    """Rank 0 to 2 and one that joins; rank 2 ends between the joining rank's admission and its first step's end.

    Returns when that one joined, who trained after each step from then on, how many exchanged, and the mean at last.
    """
    with make_model(NUMEL, {"topology": "ring"}) as model:
        if joins():
            with pytest.raises(GossipError, match=r"takes part in collective operations only after its first step"):
                model.global_avg()
        target = targets(model.world.member, NUMEL)
        joined_at = model.step if joins() else None
        members: list[tuple[int, ...]] = []
        while joined_at is None or model.step < joined_at + 8:
            model(target).backward()
            if joined_at is None and len(model.members) == 4:
                joined_at = model.step
                if model.world.member == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            model.consensus_distance()  # of those who have made a step: the joining rank is not among them at first
            gossip.save(model, folder, keep=2)
            if joined_at is not None:
                members.append(model.members)
        exchanging = model.topology.world_size
        checkpoint = gossip.load(model, folder)
        assert (checkpoint.step, checkpoint.world_size) == (model.step, 3)
        model(target).backward()
        model.global_avg()
        return joined_at, members, exchanging, flat(model.module)


@pytest.mark.slow
def test_who_trains_is_the_same_for_all_while_others_work_together(tmp_path: Path) -> None:
    function = measure_and_save_after_each_step, str(tmp_path)
    told = [one for one in unsupervised.results_of(*function, world_size=3, num_joining=1, silent=(2,)) if one]
    remaining = 0, 1, 3
    assert len(told) == len(remaining)
    joining_at, of_joining, _, expected = told[-1]
    for joined_at, members, exchanging, average in told:
        assert joined_at == joining_at
        assert members[:-8] == ([] if members is of_joining else [(0, 1, 2, 3)])  # before its first step
        assert members[-7:] == [remaining] * 7
        assert exchanging == len(remaining)
        assert torch.equal(average, expected)


def average_while_rank_2_trains() -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 2 makes a step more than the others, which wait for it with their average, and leaves; before and after."""
    model = make_model(NUMEL, {"topology": "ring"})
    rank = model.world.member
    make_steps(model, 4 + (rank == 2))
    before = flat(model.module)
    if rank == 2:
        model.leave()
    else:
        model.global_avg()
        model.close()
    return before, flat(model.module)


@pytest.mark.slow
def test_an_average_is_repeated_without_one_that_went_on_and_left() -> None:
    (before, average), (before_on_1, average_on_1), _ = unsupervised.results_of(
        average_while_rank_2_trains, world_size=3
    )
    assert torch.equal(average, average_on_1)
    assert torch.allclose(average, (before + before_on_1) / 2, rtol=1e-12)


# ---------------------------------------------------------------------- gossip.launch(restart=)


def train_until_back(victim: int, options: dict[str, Any]) -> tuple[int, tuple[tuple[int, ...], int, list[Any]]]:
    """One rank dies in its first life; all train until it, or its shard group, is there again, and some steps more."""
    with make_model(8, {"topology": "ring"} | options) as model:
        if not joins() and dist.get_rank() == victim:
            make_steps(model, 5)
            os.kill(os.getpid(), signal.SIGKILL)
        train_until(model, lambda: model.members == (0, 2, 3))
        model.global_avg()
        return int(os.environ["RANK"]), (model.members, model.step, flat(model.module).tolist())


@pytest.mark.parametrize(
    ("victim", "ranks", "options"),
    rest_is_slow(
        [(1, {"world_size": 3}, {}), (3, {"world_size": 6, "local_size": 2}, {"shape": (3, 2), "shard": "optimizer"})]
    ),
)
def test_launch_starts_a_rank_again_that_died(victim: int, ranks: dict[str, int], options: dict[str, Any]) -> None:
    results = gossip.launch(train_until_back, victim, options, **ranks, on_peer_loss="continue", restart=1)
    assert [rank for rank, _ in results] == [*range(ranks["world_size"])]
    assert all(found == results[0][1] for _, found in results)


def fail_if_rank_1(folder: str) -> int:
    """Rank 1 fails in each of its lives, of which the last is member 4."""
    rank = int(os.environ["RANK"])
    with (Path(folder) / f"lives_of_{rank}").open("a") as file:
        file.write("x")
    model = make_model(NUMEL, {"topology": "ring"})
    seen: set[int] = set()
    while 4 not in seen or 4 in model.members:
        seen |= set(model.members)
        model(targets(rank, NUMEL)).backward()
        if rank == 1:
            raise RuntimeError("again")
    model.close()
    return rank


@pytest.mark.slow
def test_a_rank_that_fails_again_and_again_is_left_out_in_the_end(tmp_path: Path) -> None:
    results = gossip.launch(fail_if_rank_1, str(tmp_path), world_size=3, on_peer_loss="continue", restart=2)
    assert results == [0, None, 2]
    assert (tmp_path / "lives_of_1").read_text() == "xxx"


# ---------------------------------------------------------------------- what cannot be joined


def test_what_is_built_otherwise_cannot_join() -> None:
    refused = [
        (NUMEL + 1, {"topology": "ring"}, r"rank \d cannot join: parameter 1 is 'first' float64 \[65\].* \[64\]"),
        (NUMEL, {"topology": "complete"}, r"cannot join: topology is .*complete.* but .*ring"),
        (NUMEL, {"topology": "ring", "compression": "int8"}, r"join: compression is int8\(.*\) here, but none on"),
        (NUMEL, {"topology": "ring", "on_peer_loss": "raise"}, 'pass on_peer_loss="continue"'),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        unsupervised.started(stay, folder, NUMEL, (0, 1, 6), {}, (), {"topology": "ring"}, world_size=2) as ranks,
    ):
        for numel, options, _ in refused:
            ranks.join(error_of, (ManifestError, ValueError), make_model, numel, options)
        texts = ranks.results(silent={0, 1})
    for text, (_, _, expected) in zip(texts[2:], refused, strict=True):
        assert re.search(expected, text)


def test_there_must_be_a_store() -> None:
    with pytest.raises(ValueError, match=r"store must be a torch.distributed.Store or \"host:port\", got 'nowhere'"):
        gossip.join_training("nowhere")
    with pytest.raises(LaunchError, match=r"there is no key-value store at 127.0.0.1:1"):
        gossip.join_training("127.0.0.1:1", timeout=timedelta(seconds=1))


@on_ranks(2, anew=True)
def test_sigterm_is_handled_until_the_model_is_closed() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    model = make_model(4, {"topology": "ring"})
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    model.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def unfreeze(folder: str) -> list[float]:
    """The norms of both parameters in the end; one that joins has its state before the others unfreeze one."""
    taken, plan = Path(folder, "taken"), Path(folder, "plan")
    admitted = JoiningRank.be_admitted

    def unfreezing_at() -> float:
        return int(plan.read_text()) if plan.exists() else math.inf

    def be_admitted(joining: JoiningRank, source: int, check_size: Any) -> Any:
        taken.touch()
        while step_of(joining._mesh, source) <= unfreezing_at() + 1:
            time.sleep(0.01)
        return admitted(joining, source, check_size)

    module = elastic_ranks.Pair(NUMEL)
    module.first.requires_grad_(False)
    with mock.patch.object(JoiningRank, "be_admitted", be_admitted):
        model = gossip.GossipDataParallel(
            module, functools.partial(torch.optim.SGD, lr=0.1), on_peer_loss="continue", timeout=timedelta(seconds=60)
        )
    for _ in steps_until(model, lambda: 3 in model.members):
        if model.rank == 0 and taken.exists() and not plan.exists():
            plan.with_suffix(".part").write_text(str(model.step + 50))  # where no rank is yet
            plan.with_suffix(".part").rename(plan)
        if model.step >= unfreezing_at():
            module.first.requires_grad_(True)
        model(targets(0, NUMEL)).backward()
    model.global_avg()
    model.close()
    return flat(module).abs().sum(1).tolist()


def test_what_the_others_unfreeze_before_the_first_step_is_exchanged_on_a_rank_that_joins(tmp_path: Path) -> None:
    first, *others = unsupervised.results_of(unfreeze, str(tmp_path), world_size=3, num_joining=1)
    assert min(first) > 0
    assert others == [first] * 3

"""Ranks that stand ready do what a test asks, each time as if they had just been started."""

import os
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RankError, fail_on, run_ranks

from gossip import World


def place() -> tuple[int, int, float, int]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), float(total), os.getpid()


def test_results_come_by_rank_from_processes_that_stay() -> None:
    first, second = (run_ranks(place, world_size=world_size) for world_size in (3, 2))
    assert [found[:3] for found in first] == [(rank, 3, 3.0) for rank in range(3)]
    assert [found[:3] for found in second] == [(rank, 2, 2.0) for rank in range(2)]
    assert [found[3] for found in second] == [found[3] for found in first[:2]]


@pytest.mark.parametrize(("how", "text"), [("raise", "ZeroDivisionError: no luck"), ("exit", "its process ended")])
def test_rank_that_failed_is_named_and_the_next_call_finds_new_ones(how: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 1, how, world_size=3)
    assert f"rank 1 failed: {text}" in str(caught.value)
    assert [found[:3] for found in run_ranks(place, world_size=3)] == [(rank, 3, 3.0) for rank in range(3)]


def test_ranks_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(place, world_size=2)  # by now all is imported
    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RankError, match=r"ranks \[0, 1\] had not ended"):
        run_ranks(wait_for_ever, world_size=2)


def wait_for_ever() -> None:
    dist.barrier()
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def build_worlds() -> list[bytes]:
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        World(timedelta(seconds=60), process_group=alone).close()
    world = World(timedelta(seconds=60))
    return world.gather_bytes(b"%d" % world.rank, "asking")  # and it is left open


def test_worlds_of_one_call_are_nothing_to_the_next() -> None:
    for _ in range(2):
        assert run_ranks(build_worlds, world_size=2) == [[b"0", b"1"]] * 2

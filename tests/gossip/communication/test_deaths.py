"""A rank that is killed or frozen is the one that every other rank names, whoever waits for whom."""

from __future__ import annotations

import functools
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unsupervised
from torch import nn

import gossip.communication.world as worlds
from gossip import ExchangeError, GossipDataParallel, LaunchError, World, launch
from gossip.communication import roll_call
from gossip.communication.process_states import Process

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
TOPOLOGIES = ("ring", "one_peer_exponential")
VICTIM = 3


def stop_here(how: str) -> None:
    os.kill(os.getpid(), SIGNALS[how])


def pretend_to_be_on_machines_of_their_own() -> None:
    rank = dist.get_rank()
    roll_call.own_process = lambda: Process(f"machine {rank}", os.getpid(), 0)


def make_model(topology: str, timeout: timedelta) -> GossipDataParallel:
    torch.manual_seed(0)
    return GossipDataParallel(nn.Linear(4, 2), functools.partial(torch.optim.SGD, lr=0.1), topology, timeout=timeout)


def train_until_one_stops(topology: str, how: str, timeout: timedelta) -> None:
    model = make_model(topology, timeout)
    for step in range(30):
        if model.rank == VICTIM and step == 5:
            stop_here(how)
        model(torch.ones(2, 4)).sum().backward()


def error_of_a_survivor(topology: str, how: str, timeout: timedelta, *, together: bool) -> tuple[str, tuple[int, ...]]:
    if not together:
        pretend_to_be_on_machines_of_their_own()
    with pytest.raises(ExchangeError) as caught:
        train_until_one_stops(topology, how, timeout)
    assert isinstance(caught.value.__cause__, RuntimeError | None)
    return str(caught.value), caught.value.culprits


def assert_only_the_victim_is_blamed(by_rank: list[Any], why: str) -> None:
    for rank, found in enumerate(by_rank):
        if rank == VICTIM:
            assert found is None
        else:
            text, culprits = found
            assert culprits == (VICTIM,), text
            assert text.startswith(f"rank {rank}: ")
            assert f": rank {VICTIM} is {why}" in text
            assert "gloo" not in text
            assert text.count(" is absent") + text.count(" is gone") + text.count(" is frozen") == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("together", "why"), [(True, "gone: its process "), (False, "absent (dead, frozen,")])
def test_killed_rank_is_named_by_all_long_before_the_time_out(topology: str, together: bool, why: str) -> None:
    survivor = functools.partial(error_of_a_survivor, together=together)
    by_rank = unsupervised.run(survivor, topology, "killed", timedelta(minutes=5), world_size=4)
    assert_only_the_victim_is_blamed(by_rank, why)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("together", "why"), [(True, "frozen: its process "), (False, "absent (dead, frozen,")])
def test_frozen_rank_is_named_by_all(topology: str, together: bool, why: str) -> None:
    survivor = functools.partial(error_of_a_survivor, together=together)
    by_rank = unsupervised.run(survivor, topology, "frozen", timedelta(seconds=4), world_size=4, silent=VICTIM)
    assert_only_the_victim_is_blamed(by_rank, why)


@pytest.mark.parametrize("how", SIGNALS)
def test_launch_names_the_rank_that_stopped(how: str) -> None:
    with pytest.raises(LaunchError, match=f"^rank {VICTIM} failed: ") as caught:
        launch(train_until_one_stops, "ring", how, timedelta(seconds=4), world_size=4)
    assert caught.value.rank == VICTIM
    assert ("is suspended (SIGSTOP, or a debugger)" in str(caught.value)) == (how == "frozen")
    assert ("with signal 9 (SIGKILL)" in str(caught.value)) == (how == "killed")
    assert "gloo" not in str(caught.value)


def construct_while_one_stops(where: str) -> tuple[str, tuple[int, ...]]:
    if dist.get_rank() == VICTIM:

        def stop(*_: Any) -> None:
            stop_here("killed")

        if where == "connecting":
            worlds.gloo_group = stop
        else:
            setattr(World, {"comparing manifests": "gather_bytes", "broadcasting": "broadcast_"}[where], stop)
    with pytest.raises(ExchangeError) as caught:
        make_model("ring", timedelta(minutes=5))
    return str(caught.value), caught.value.culprits


@pytest.mark.parametrize("where", ["connecting", "comparing manifests", "broadcasting"])
def test_rank_killed_in_construction_is_named_by_all_long_before_the_time_out(where: str) -> None:
    by_rank = unsupervised.run(construct_while_one_stops, where, world_size=4)
    assert_only_the_victim_is_blamed(by_rank, "gone: its process ")

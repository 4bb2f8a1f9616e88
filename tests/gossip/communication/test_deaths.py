"""A rank that is killed, frozen or cut off is the one that every other rank names, whoever waits for whom."""

import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import unsupervised
from lab_hosts import why_no_hosts
from lone_ranks import wait_until
from torch import nn

import gossip.communication.world as worlds
from gossip import ExchangeError, GossipDataParallel, LaunchError, World, launch
from gossip.communication.liveness import progress_markers
from gossip.communication.liveness.process_liveness import Process, is_suspended
from gossip.lab.benchmarks.network.shaped_hosts import Lab
from gossip.launching import launcher

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deaths")]  # all worlds wait at the same time

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
TIMEOUTS = {"killed": timedelta(minutes=5), "frozen": timedelta(seconds=4)}
OUTPUTS = {"ring": 2, "one_peer_exponential": 2, "complete": 5000}
"""Of the model by topology: the messages of the last one are large enough to go through memory."""
TOPOLOGIES = tuple(OUTPUTS)
CASES = [
    (topology, how, together)
    for topology, how, together in itertools.product(TOPOLOGIES, SIGNALS, (False, True))
    if together or topology != "complete"  # memory is for those who are together
]
PLACES = ("connecting", "comparing manifests", "broadcasting")
VICTIM = 3
LIMITS = re.compile(r"(?:within|after) (\S+) s\b")


def stop_here(how: str) -> None:
    os.kill(os.getpid(), SIGNALS[how])


def pretend_to_be_on_machines_of_their_own() -> None:
    rank = dist.get_rank()
    progress_markers.own_process = lambda: Process(f"machine {rank}", os.getpid(), 0)


def make_model(topology: str, timeout: timedelta) -> GossipDataParallel:
    torch.manual_seed(0)
    module = nn.Linear(4, OUTPUTS[topology])
    return GossipDataParallel(module, functools.partial(torch.optim.SGD, lr=0.1), topology, timeout=timeout)


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
    return str(caught.value), caught.value.failed_ranks


def assert_only_the_victim_is_blamed(by_rank: list[Any], why: str, timeout: timedelta) -> None:
    for rank, found in enumerate(by_rank):
        if rank == VICTIM:
            assert found is None
        else:
            text, failed_ranks = found
            assert failed_ranks == (VICTIM,), text
            assert text.startswith(f"rank {rank}: ")
            assert f": rank {VICTIM} is {why}" in text
            assert "gloo" not in text
            assert set(LIMITS.findall(text)) <= {f"{timeout.total_seconds():g}"}, "of time, the time-out alone is named"
            assert text.count(" is absent") + text.count(" is gone") + text.count(" is frozen") == 1


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
    return str(caught.value), caught.value.failed_ranks


class Found(NamedTuple):
    """What each rank was told, by (topology, how, together) or where in the construction; and what launch said."""

    in_training: dict[tuple[str, str, bool], list[Any]]
    in_construction: dict[str, list[Any]]
    by_launch: BaseException | None


@pytest.fixture(scope="module")
def found() -> Found:
    """All worlds wait at the same time; but each trains by itself until its victim has stopped."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def start(function: Callable[..., Any], *args: Any) -> unsupervised.Ranks:
            ranks = stack.enter_context(unsupervised.started(function, *args, world_size=4))
            ranks.wait_until_stopped(VICTIM)
            return ranks

        launched = pool.submit(launch, train_until_one_stops, "ring", "frozen", TIMEOUTS["frozen"], world_size=4)
        while not (launched.done() or list(map(is_suspended, launcher._worker_pids[VICTIM:])) == [True]):
            time.sleep(0.02)
        training = {}
        for topology, how, together in CASES:
            survivor = functools.partial(error_of_a_survivor, together=together)
            training[topology, how, together] = start(survivor, topology, how, TIMEOUTS[how])
        constructing = {where: start(construct_while_one_stops, where) for where in PLACES}
        return Found(
            {case: ranks.results(silent={VICTIM} if "frozen" in case else ()) for case, ranks in training.items()},
            {where: ranks.results() for where, ranks in constructing.items()},
            launched.exception(),
        )


@pytest.mark.parametrize(("topology", "how", "together"), CASES)
def test_rank_that_stops_is_named_by_all(found: Found, topology: str, how: str, together: bool) -> None:
    """One that is killed long before the time-out of five minutes."""
    seen = {"killed": "gone: its process ", "frozen": "frozen: its process "}[how]
    why = seen if together else "absent (dead, frozen,"
    assert_only_the_victim_is_blamed(found.in_training[topology, how, together], why, TIMEOUTS[how])


def test_launch_names_the_rank_that_was_frozen(found: Found) -> None:
    assert isinstance(found.by_launch, LaunchError)
    text = str(found.by_launch)
    assert text.startswith(f"rank {VICTIM} failed: ")
    assert found.by_launch.rank == VICTIM
    assert "is suspended (SIGSTOP, or a debugger)" in text
    assert "with signal 9 (SIGKILL)" not in text
    assert "gloo" not in text


@pytest.mark.parametrize("where", PLACES)
def test_rank_killed_in_construction_is_named_by_all_long_before_the_time_out(found: Found, where: str) -> None:
    assert_only_the_victim_is_blamed(found.in_construction[where], "gone: its process ", TIMEOUTS["killed"])


def train_until_one_is_cut_off(topology: str) -> tuple[str, tuple[int, ...]]:
    model = make_model(topology, TIMEOUTS["frozen"])
    with pytest.raises(ExchangeError) as caught:  # noqa: PT012 -- the step at which it happens is another on each rank
        for step in range(30):
            if model.rank == VICTIM and step == 5:
                subprocess.run(["ip", "link", "set", Lab.interface, "down"], check=True)
            model(torch.ones(2, 4)).sum().backward()
    return str(caught.value), caught.value.failed_ranks


def construct_on_machines_of_their_own_while_one_stops(where: str) -> tuple[str, tuple[int, ...]]:
    pretend_to_be_on_machines_of_their_own()
    return construct_while_one_stops(where)


def is_cut_off(hosts: Lab) -> bool:
    with hosts.entered(VICTIM):
        return not subprocess.check_output(["ip", "link", "show", Lab.interface, "up"])


@pytest.fixture(scope="module")
def apart() -> dict[str, list[Any]]:
    """What each rank on a host of its own was told, by topology or by where it happened. Skips where there can be none.

    All worlds wait at the same time; but each trains by itself until its victim has stopped, or is on its own.
    """
    if missing := why_no_hosts():
        pytest.skip(missing)
    with contextlib.ExitStack() as stack:

        def start(function: Callable[..., Any], case: str) -> unsupervised.Ranks:
            hosts = stack.enter_context(contextlib.closing(Lab(4)))
            ranks = stack.enter_context(unsupervised.started(function, case, world_size=4, hosts=hosts))
            if function is train_until_one_is_cut_off:
                wait_until(lambda: is_cut_off(hosts))
            else:
                ranks.wait_until_stopped(VICTIM)
            return ranks

        worlds = {topology: start(train_until_one_is_cut_off, topology) for topology in TOPOLOGIES}
        worlds["connecting"] = start(construct_on_machines_of_their_own_while_one_stops, "connecting")
        return {case: ranks.results() for case, ranks in worlds.items()}


@pytest.mark.root
@pytest.mark.xdist_group("cut_hosts")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rank_on_a_host_that_is_cut_off_is_named_by_all_others(apart: dict[str, list[Any]], topology: str) -> None:
    by_rank = list(apart[topology])
    text, failed_ranks = by_rank[VICTIM]
    by_rank[VICTIM] = None
    assert_only_the_victim_is_blamed(by_rank, "absent (dead, frozen, cut off or busy)", TIMEOUTS["frozen"])
    assert failed_ranks == ()
    assert "the key-value store does not reply: this rank is cut off from it, or the process that holds it" in text


@pytest.mark.root
@pytest.mark.xdist_group("cut_hosts")
def test_rank_that_dies_in_construction_on_another_machine_is_named_long_before_the_time_out(
    apart: dict[str, list[Any]],
) -> None:
    assert_only_the_victim_is_blamed(apart["connecting"], "gone: its process ", TIMEOUTS["killed"])

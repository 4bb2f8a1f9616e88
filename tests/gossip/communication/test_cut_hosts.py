"""Ranks on hosts of their own: one is cut off in mid-training, or dies while they connect, and all others name it.

Needs root.
"""

import contextlib
import subprocess
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import unsupervised
from lab_hosts import why_no_hosts
from lone_ranks import wait_until
from test_deaths import (
    TOPOLOGIES,
    VICTIM,
    assert_only_the_victim_is_blamed,
    construct_while_one_stops,
    make_model,
    pretend_to_be_on_machines_of_their_own,
)

from gossip import ExchangeError
from gossip.lab.benchmarks.network.shaped_hosts import Lab

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cut_hosts")]  # all worlds wait at the same time

TIMEOUT = timedelta(seconds=4)
PLACE = "connecting"


def train_until_one_is_cut_off(topology: str) -> tuple[str, tuple[int, ...]]:
    model = make_model(topology, TIMEOUT)
    with pytest.raises(ExchangeError) as caught:  # noqa: PT012 -- the step at which it happens is another on each rank
        for step in range(30):
            if model.rank == VICTIM and step == 5:
                subprocess.run(["ip", "link", "set", Lab.interface, "down"], check=True)
            model(torch.ones(2, 4)).sum().backward()
    return str(caught.value), caught.value.failed_ranks


def construct_on_machines_of_their_own_while_one_stops(where: str) -> tuple[str, tuple[int, ...]]:
    pretend_to_be_on_machines_of_their_own()
    return construct_while_one_stops(where)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each rank was told, by topology or by where it happened. Skips where there can be no hosts.

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
        worlds[PLACE] = start(construct_on_machines_of_their_own_while_one_stops, PLACE)
        return {case: ranks.results() for case, ranks in worlds.items()}


def is_cut_off(hosts: Lab) -> bool:
    with hosts.entered(VICTIM):
        return not subprocess.check_output(["ip", "link", "show", Lab.interface, "up"])


@pytest.mark.root
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rank_on_a_host_that_is_cut_off_is_named_by_all_others(found: dict[str, list[Any]], topology: str) -> None:
    by_rank = list(found[topology])
    text, failed_ranks = by_rank[VICTIM]
    by_rank[VICTIM] = None
    assert_only_the_victim_is_blamed(by_rank, "absent (dead, frozen, cut off or busy)", TIMEOUT)
    assert failed_ranks == ()
    assert "the key-value store does not reply: this rank is cut off from it, or the process that holds it" in text


@pytest.mark.root
def test_rank_that_dies_in_construction_on_another_machine_is_named_long_before_the_time_out(
    found: dict[str, list[Any]],
) -> None:
    assert_only_the_victim_is_blamed(found[PLACE], "gone: its process ", timedelta(minutes=5))

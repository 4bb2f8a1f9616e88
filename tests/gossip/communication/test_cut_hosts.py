"""Ranks on hosts of their own: one is cut off in mid-training, or dies while they connect, and all others name it.

Needs root.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import unsupervised
from lab_hosts import why_no_hosts
from test_deaths import (
    VICTIM,
    assert_only_the_victim_is_blamed,
    construct_while_one_stops,
    make_model,
    pretend_to_be_on_machines_of_their_own,
)

from gossip import ExchangeError
from gossip.lab.benchmarks.shaped_hosts import Lab

TIMEOUT = timedelta(seconds=4)


@pytest.fixture
def hosts() -> Iterator[Lab]:
    """Skips where there can be none."""
    if missing := why_no_hosts():
        pytest.skip(missing)
    made = Lab(4)
    yield made
    made.close()


def train_until_one_is_cut_off(topology: str) -> tuple[str, tuple[int, ...]]:
    model = make_model(topology, TIMEOUT)
    with pytest.raises(ExchangeError) as caught:  # noqa: PT012 -- the step at which it happens is another on each rank
        for step in range(30):
            if model.rank == VICTIM and step == 5:
                subprocess.run(["ip", "link", "set", Lab.interface, "down"], check=True)
            model(torch.ones(2, 4)).sum().backward()
    return str(caught.value), caught.value.culprits


@pytest.mark.root
@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
def test_rank_on_a_host_that_is_cut_off_is_named_by_all_others(hosts: Lab, topology: str) -> None:
    by_rank = unsupervised.run(train_until_one_is_cut_off, topology, world_size=4, hosts=hosts)
    text, culprits = by_rank[VICTIM]
    by_rank[VICTIM] = None
    assert_only_the_victim_is_blamed(by_rank, "absent (dead, frozen, cut off or busy)")
    assert culprits == ()
    assert "the key-value store does not answer: this rank is cut off from it, or the process that holds it" in text


def construct_on_machines_of_their_own_while_one_stops(where: str) -> tuple[str, tuple[int, ...]]:
    pretend_to_be_on_machines_of_their_own()
    return construct_while_one_stops(where)


@pytest.mark.root
@pytest.mark.parametrize("where", ["connecting", "comparing manifests", "broadcasting"])
def test_rank_that_dies_in_construction_on_another_machine_is_named_long_before_the_time_out(
    hosts: Lab, where: str
) -> None:
    by_rank = unsupervised.run(construct_on_machines_of_their_own_while_one_stops, where, world_size=4, hosts=hosts)
    assert_only_the_victim_is_blamed(by_rank, "gone: its process ")

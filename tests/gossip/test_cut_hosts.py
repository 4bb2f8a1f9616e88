"""A host that is cut off in mid-training: all others name its rank, and it says that it is cut off. Needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import unsupervised
from test_deaths import VICTIM, assert_only_the_victim_is_blamed, make_model

from gossip import ExchangeError
from gossip.benchmarks.lab import Lab, what_is_missing
from gossip.benchmarks.namespaces import Namespace

TIMEOUT = timedelta(seconds=4)


@pytest.fixture
def hosts() -> Iterator[Lab]:
    """Skips where there can be none."""
    missing = what_is_missing()
    if missing is None:
        try:
            Namespace().close()
        except OSError as error:
            missing = f"network namespaces are not permitted here ({error.strerror})"
    if missing is not None:
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

"""Ranks on hosts of their own: one of them is cut off, and the others go on. Needs root."""

import contextlib
import re
import subprocess
from datetime import timedelta
from typing import Any

import pytest
import torch
import unsupervised
from elastic_ranks import flat, make_model, steps_until, targets
from lab_hosts import why_no_hosts

from gossip import ExchangeError
from gossip.lab.benchmarks.network.shaped_hosts import Lab

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.xdist_group("network_partitions")]

TIMEOUT = timedelta(seconds=3)
VICTIM = 1
OUTAGE_S = 12  # longer than it takes to give up


def train_until_one_is_lost(how: str) -> tuple[tuple[int, ...], torch.Tensor] | str:
    rank = torch.distributed.get_rank()
    waits = 60 if how == "cut off for a while" else None
    model = make_model(64, {"topology": "ring", "timeout": TIMEOUT, "partition_timeout": waits})
    for _ in steps_until(model, lambda: waits is None or 4 in model.members, 30):  # the victim, under a new number
        if rank == VICTIM and model.step == 5:
            subprocess.run(["ip", "link", "set", Lab.interface, "down"], check=True)
            if waits is not None:
                subprocess.Popen(["sh", "-c", f"sleep {OUTAGE_S}; ip link set {Lab.interface} up"])
        try:
            model(targets(rank, 64)).backward()
        except ExchangeError as error:
            return str(error)
    model.global_avg()
    return model.members, flat(model.module)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each rank tells; both worlds at the same time."""
    if missing := why_no_hosts():
        pytest.skip(missing)
    with contextlib.ExitStack() as stack:
        worlds = {}
        for how in ("cut off", "cut off for a while"):
            hosts = stack.enter_context(contextlib.closing(Lab(4)))
            worlds[how] = stack.enter_context(
                unsupervised.started(train_until_one_is_lost, how, world_size=4, hosts=hosts)
            )
        return {how: ranks.results() for how, ranks in worlds.items()}


def test_the_others_go_on(found: dict[str, list[Any]]) -> None:
    left = [found["cut off"][rank] for rank in (0, 2, 3)]
    assert [members for members, _ in left] == [(0, 2, 3)] * 3
    assert all(torch.equal(values, left[0][1]) for _, values in left)


def test_who_is_cut_off_for_a_while_comes_back(found: dict[str, list[Any]]) -> None:
    results = found["cut off for a while"]
    assert [members for members, _ in results] == [(0, 2, 3, 4)] * 4
    assert all(torch.equal(values, results[0][1]) for _, values in results)


def test_who_is_cut_off_trains_no_further_and_says_so(found: dict[str, list[Any]]) -> None:
    text = found["cut off"][VICTIM]
    assert re.match(
        rf"rank {VICTIM}: step \d: no agreement on the remaining ranks within 6 s: the key-value store does not", text
    )

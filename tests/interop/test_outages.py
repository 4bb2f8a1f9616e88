"""Networks that are silent for a while, shorter than the time-out: training goes on as if nothing had been.

An outage lasts until TCP's pauses between two attempts have stopped growing, which is before the time-out by far.
"""

import functools
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import unsupervised
from lab_hosts import kernel_knows_rto_max, why_no_hosts
from lone_ranks import wait_until
from torch import nn

from gossip import GossipDataParallel
from gossip.communication.host.tcp_options import longest_pause_ms
from gossip.lab.benchmarks.network.shaped_hosts import Lab

TIMEOUT = timedelta(seconds=40)
LONGEST_PAUSE_MS = longest_pause_ms(TIMEOUT, 15)
NUM_STEPS, CUT_AFTER = 30, 10
SGD = functools.partial(torch.optim.SGD, lr=0.01)
CASES = [(2, "one_peer_exponential"), (3, "one_peer_exponential"), (3, "complete")]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout


def know_each_other(network: Lab, num_hosts: int) -> None:
    """Nobody asks for addresses any more: hosts whose question is not answered hear of the outage at once."""
    addresses = {}
    for rank in range(num_hosts):
        with network.entered(rank):
            addresses[network.address(rank)] = json.loads(command("ip", "-j", "link", "show", "eth0"))[0]["address"]
    for rank in range(num_hosts):
        with network.entered(rank):
            for address, link in addresses.items():
                if address != network.address(rank):
                    command("ip", "neighbor", "replace", address, "lladdr", link, "dev", "eth0", "nud", "permanent")


def train(topology: str, reached: Path) -> str:
    """Runs on every rank: the bits that it ends with. Rank 0 says when it is time to cut one off."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
    with GossipDataParallel(module, SGD, topology, timeout=TIMEOUT, bucket_cap_mb=0.1) as model:
        for step in range(NUM_STEPS):
            model(inputs).square().mean().backward()
            if step == CUT_AFTER and model.rank == 0:
                reached.touch()
        model.global_avg()
        return float(module[0].weight.double().sum()).hex()


def cut_off(network: Lab, reached: Path) -> None:
    """Rank 1, after a step of rank 0, until it has tried often."""
    wait_until(reached.exists)
    with network._bridge.entered():
        command("ip", "link", "set", "port1", "nomaster")
    with network.entered(1):
        wait_until(pauses_are_bounded)
    with network._bridge.entered():
        command("ip", "link", "set", "port1", "master", "bridge")


def pauses_are_bounded() -> bool:
    """Whether a connection of this host has doubled its pause more often than it has become longer."""
    lines = command("ss", "--tcp", "--info", "--numeric", "--no-header").splitlines()
    found = [re.search(r"rto:([\d.]+) backoff:(\d+)", line) for line in lines]
    pauses = [(float(match[1]), 200 * 2 ** int(match[2])) for match in found if match]
    return any(pause_ms <= LONGEST_PAUSE_MS < doubled_ms / 2 for pause_ms, doubled_ms in pauses)


def train_on_hosts(is_cut: bool, num_hosts: int, topology: str, reached: Path) -> list[str | None]:
    """What every rank ends with; None if it does not come to its end."""
    network = Lab(num_hosts, 100_000_000)
    try:
        know_each_other(network, num_hosts)
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(cut_off, network, reached) if is_cut else None
            with unsupervised.started(train, topology, reached, world_size=num_hosts, hosts=network) as ranks:
                ended = ranks.results()
            if cut is not None:
                cut.result()
        return ended
    finally:
        network.close()


@pytest.mark.root
def test_an_outage_shorter_than_the_timeout_is_no_failure(tmp_path: Path) -> None:
    missing = why_no_hosts() if kernel_knows_rto_max() else "this kernel has no TCP_RTO_MAX_MS"
    if missing is not None:
        pytest.skip(missing)
    with ThreadPoolExecutor(2 * len(CASES)) as pool:  # a namespace is a thread's: labs do not meet
        runs = {
            (is_cut, *case): pool.submit(train_on_hosts, is_cut, *case, tmp_path / f"{is_cut} {case}")
            for case in CASES
            for is_cut in (True, False)
        }
    for case in CASES:
        found, undisturbed = (runs[is_cut, *case].result() for is_cut in (True, False))
        assert None not in found, case
        assert found == undisturbed

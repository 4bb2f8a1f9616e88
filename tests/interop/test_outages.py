"""Networks that are silent for a while, shorter than the time-out: training goes on as if nothing had been."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import unsupervised
from torch import nn

from gossip import GossipDataParallel
from gossip.lab.benchmarks.network import shaped_hosts
from gossip.lab.benchmarks.network.namespaces import Namespace
from gossip.lab.benchmarks.network.networks import Link
from gossip.lab.benchmarks.network.shaped_hosts import Lab

TIMEOUT = timedelta(seconds=10)
NUM_STEPS, CUT_AFTER = 30, 10
PATIENCE_S = 120
SGD = functools.partial(torch.optim.SGD, lr=0.01)
CASES = [(3.0, 2, "one_peer_exponential"), (7.0, 3, "one_peer_exponential"), (9.0, 3, "complete")]


def why_not() -> str | None:
    missing = shaped_hosts.what_is_missing()
    if missing is None:
        try:
            Namespace().close()
            with socket.socket() as unconnected:
                unconnected.setsockopt(socket.IPPROTO_TCP, 44, 1000)
        except OSError as error:
            missing = f"this kernel has no network namespaces or no TCP_RTO_MAX_MS ({error.strerror})"
    return missing


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


def cut_off(network: Lab, outage_s: float, reached: Path) -> None:
    """Rank 1, after a step of rank 0."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached.exists():
        assert time.monotonic() < deadline, "rank 0 did not come to the step"
        time.sleep(0.001)
    for words in (("nomaster",), ("master", "bridge")):
        with network._bridge.entered():
            command("ip", "link", "set", "port1", *words)
        if words == ("nomaster",):
            time.sleep(outage_s)  # the length of the outage is what is tested


def train_on_hosts(outage_s: float, num_hosts: int, topology: str, reached: Path) -> list[str | None]:
    """What every rank ends with; None if it does not come to its end."""
    network = Lab(num_hosts, Link(100_000_000))
    try:
        know_each_other(network, num_hosts)
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(cut_off, network, outage_s, reached) if outage_s else None
            with unsupervised.started(train, topology, reached, world_size=num_hosts, hosts=network) as ranks:
                ended = ranks.results()
            if cut is not None:
                cut.result()
        return ended
    finally:
        network.close()


@pytest.mark.root
def test_an_outage_shorter_than_the_timeout_is_no_failure(tmp_path: Path) -> None:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with ThreadPoolExecutor(2 * len(CASES)) as pool:  # a namespace is a thread's: labs do not meet
        runs = {
            (outage_s, *others): pool.submit(train_on_hosts, outage_s, *others, tmp_path / f"{outage_s} {others}")
            for length, *others in CASES
            for outage_s in (length, 0.0)
        }
    for length, num_hosts, topology in CASES:
        found, undisturbed = (runs[outage_s, num_hosts, topology].result() for outage_s in (length, 0.0))
        assert None not in found, (length, num_hosts, topology)
        assert found == undisturbed

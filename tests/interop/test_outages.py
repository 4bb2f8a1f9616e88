"""Networks that are silent for a while, shorter than the time-out: training goes on as if nothing had been."""

from __future__ import annotations

import functools
import json
import os
import select
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
from ranks import run_ranks
from torch import nn

from gossip import DistributedTransport, GossipDataParallel
from gossip.lab.benchmarks import shaped_hosts
from gossip.lab.benchmarks.namespaces import Namespace
from gossip.lab.benchmarks.shaped_hosts import Lab

TIMEOUT = timedelta(seconds=10)
NUM_STEPS, CUT_AFTER = 30, 10
PATIENCE_S = 120
CASES = [(3.0, 2, "one_peer_exponential"), (7.0, 3, "one_peer_exponential"), (9.0, 3, "complete")]


def train_and_tell(topology: str, path: str | None) -> str:
    """The sum of the weights of the global average, to the bit; rank 0 writes to ``path`` when it may be cut off."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
    transport = functools.partial(DistributedTransport, shares_memory=False)  # sums in another order
    with GossipDataParallel(
        module, optimizer, topology, timeout=TIMEOUT, bucket_cap_mb=0.1, transport=transport
    ) as model:
        for step in range(NUM_STEPS):
            model(inputs).square().mean().backward()
            if step == CUT_AFTER and path is not None and model.rank == 0:
                Path(path).write_text("reached")
        model.global_avg()
        return float(module[0].weight.detach().double().sum()).hex()


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


def train_cut_off(outage_s: float, num_hosts: int, topology: str, path: Path) -> list[str | None]:
    """What every rank found; rank 1 is cut off after a step of rank 0."""
    os.mkfifo(path)
    network = Lab(num_hosts)
    try:
        network.shape(100_000_000)
        know_each_other(network, num_hosts)
        with ThreadPoolExecutor(1) as pool, open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as reached:
            found = pool.submit(
                unsupervised.run, train_and_tell, topology, str(path), world_size=num_hosts, hosts=network
            )
            assert select.select([reached], [], [], PATIENCE_S)[0], "no rank came that far"
            with network._bridge.entered():  # type: ignore[union-attr]
                command("ip", "link", "set", "port1", "nomaster")
            time.sleep(outage_s)  # the length of the outage is what is tested
            with network._bridge.entered():  # type: ignore[union-attr]
                command("ip", "link", "set", "port1", "master", "bridge")
            return found.result()
    finally:
        network.close()


@pytest.mark.root
def test_an_outage_shorter_than_the_timeout_is_no_failure(tmp_path: Path) -> None:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with ThreadPoolExecutor(len(CASES)) as pool:  # a namespace is a thread's: labs do not meet
        running = [pool.submit(train_cut_off, *case, tmp_path / str(case[0])) for case in CASES]
        cut = [each.result() for each in running]
    for (outage_s, num_hosts, topology), found in zip(CASES, cut, strict=True):
        undisturbed = run_ranks(train_and_tell, topology, None, world_size=num_hosts)
        assert len(set(undisturbed)) == 1
        assert found == undisturbed, outage_s

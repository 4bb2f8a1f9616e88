"""Networks that are silent for a while, shorter than the time-out: training goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gossip.lab.benchmarks import shaped_hosts
from gossip.lab.benchmarks.namespaces import Namespace
from gossip.lab.benchmarks.shaped_hosts import Lab

TIMEOUT_S = 10
NUM_STEPS, CUT_AFTER = 30, 10
PATIENCE_S = 120
CASES = [(3.0, 2, "one_peer_exponential"), (7.0, 3, "one_peer_exponential"), (9.0, 3, "complete")]

WORKER = """
import os, sys
from datetime import timedelta
from functools import partial
import torch
import torch.distributed as dist
import gossip

rank, world_size, host, port, timeout_s, topology, num_steps = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
torch.set_num_threads(1)
patience = timedelta(seconds=60)
store = dist.TCPStore(host, int(port), is_master=False, timeout=patience)
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=patience)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
optimizer = partial(torch.optim.SGD, lr=0.01)
timeout = timedelta(seconds=float(timeout_s))
inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(int(rank)))
with gossip.GossipDataParallel(module, optimizer, topology, timeout=timeout, bucket_cap_mb=0.1) as model:
    for step in range(int(num_steps)):
        model(inputs).square().mean().backward()
        print("step", step, flush=True)
    model.global_avg()
    print("ended with", module[0].weight.double().sum().item().hex(), flush=True)
dist.destroy_process_group()
"""


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


@contextlib.contextmanager
def workers(network: Lab, num_hosts: int, topology: str) -> Iterator[list[subprocess.Popen[str]]]:
    store = network.start_store(timedelta(seconds=60))
    with contextlib.ExitStack() as running:
        started = []
        for rank in range(num_hosts):
            told = [rank, num_hosts, store.host, store.port, TIMEOUT_S, topology, NUM_STEPS]
            with network.entered(rank):
                process = subprocess.Popen(
                    [sys.executable, "-c", WORKER, *map(str, told)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            started.append(running.enter_context(process))
            running.callback(process.kill)
        yield started


def train(outage_s: float, num_hosts: int, topology: str) -> list[tuple[int, str, str]]:
    """Status, last line and last words of every rank; rank 1 is cut off after a step of rank 0."""
    network = Lab(num_hosts)
    try:
        network.shape(100_000_000)
        know_each_other(network, num_hosts)
        with workers(network, num_hosts, topology) as processes:
            reached = threading.Event()
            if outage_s:
                first = processes[0].stdout
                assert first is not None
                for line in first:
                    if line == f"step {CUT_AFTER}\n":
                        reached.set()
                        break
                assert reached.is_set()
                with network._bridge.entered():  # type: ignore[union-attr]
                    command("ip", "link", "set", "port1", "nomaster")
                time.sleep(outage_s)  # the length of the outage is what is tested
                with network._bridge.entered():  # type: ignore[union-attr]
                    command("ip", "link", "set", "port1", "master", "bridge")
            said = [process.communicate(timeout=PATIENCE_S) for process in processes]
            return [
                (process.returncode, (out.splitlines() or [""])[-1], err[-500:])
                for process, (out, err) in zip(processes, said, strict=True)
            ]
    finally:
        network.close()


@pytest.mark.root
def test_an_outage_shorter_than_the_timeout_is_no_failure() -> None:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with ThreadPoolExecutor(len(CASES)) as pool:  # a namespace is a thread's: labs do not meet
        cut = list(pool.map(lambda case: train(*case), CASES))
        undisturbed = list(pool.map(lambda case: train(0.0, *case[1:]), CASES))
    for case, found, expected in zip(CASES, cut, undisturbed, strict=True):
        assert [status for status, *_ in found] == [0] * case[1], (case, found)
        assert found[0][1].startswith("ended with "), (case, found)
        assert {last for _, last, _ in found} == {last for _, last, _ in expected}, case

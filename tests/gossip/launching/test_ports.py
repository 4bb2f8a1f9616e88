"""Who can reach what a run listens on, and which signals its processes: under ``launch`` nobody on another machine."""

import os
import signal
from collections import Counter
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gossip

LISTENS = "0A"


def listening(process_id: int) -> list[str]:
    """The addresses on which a process of this machine listens, one per socket."""
    inodes = set()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{process_id}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            address, state, inode = fields[1].partition(":")[0], fields[3], fields[9]
            if state == LISTENS and inode in inodes:
                is_v4 = table == "tcp"
                found.append(str(IPv4Address(bytes.fromhex(address)[::-1])) if is_v4 else address)
    return found


def listening_while_training(parent: int) -> tuple[list[str], list[str]]:
    module = torch.nn.Linear(4, 1)
    model = gossip.GossipDataParallel(module, partial(torch.optim.SGD, lr=0.1), topology="ring")
    model(torch.ones(2, 4)).sum().backward()
    found = listening(os.getpid()), listening(parent)
    dist.barrier()
    return found


def test_launch_listens_on_this_machine_alone() -> None:
    before = Counter(listening(os.getpid()))  # of the ranks that stand ready for other tests
    for ranks, parent in gossip.launch(listening_while_training, os.getpid(), world_size=2):
        of_launch = Counter(parent) - before
        assert ranks
        assert of_launch
        assert {*ranks, *of_launch} == {"127.0.0.1"}


FOR_ALL = {signal.SIGINT, signal.SIGUSR1}


def signals_of(status: Path, field: str) -> set[signal.Signals]:
    """One of the masks that Linux writes in hexadecimal digits; the ones of ``FOR_ALL`` in it."""
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    mask = int(line.split()[1], 16)
    return {number for number in FOR_ALL if mask >> (number - 1) & 1}


def worker_and_its_parent() -> tuple[int, set[signal.Signals], set[signal.Signals], set[signal.Signals]]:
    own, parent = Path("/proc/self/status"), Path(f"/proc/{os.getppid()}/status")
    return os.getppid(), signals_of(own, "SigIgn"), signals_of(own, "SigBlk"), signals_of(parent, "SigBlk")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: /proc tells what a process blocks")
def test_fork_server_blocks_what_ends_a_run_and_workers_leave_ctrl_c_to_the_launcher() -> None:
    fork_server, ignored, blocked, blocked_by_the_fork_server = gossip.launch(worker_and_its_parent, world_size=2)[0]
    assert fork_server != os.getpid()
    assert blocked_by_the_fork_server == FOR_ALL  # before its imports are over as well: it inherits them
    assert signal.SIGINT in ignored
    assert signal.SIGUSR1 not in ignored | blocked

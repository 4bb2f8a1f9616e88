"""Who can reach what a run listens on: under ``launch`` nobody on another machine."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

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

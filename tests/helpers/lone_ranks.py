"""Ranks that are started on their own and meet in a store: their program, the store, and what they leave."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from repository import REPOSITORY
from running import Running, running

COMMAND = REPOSITORY / "gossip" / "__main__.py"
PATIENCE_S = 120

SCRIPT = """
import functools, json, os, sys, time
from pathlib import Path

import torch
import gossip

def train():
    model = gossip.GossipDataParallel(
        torch.nn.Linear(WIDTH, 1, dtype=torch.float64), functools.partial(torch.optim.SGD, lr=0.01), topology="ring",
        on_peer_loss="continue", min_ranks=1, MESH)
    member, last = model.world.member, None
    inputs = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(member))
    while last is None or model.step < last:
        if last is None and eval(sys.argv[1], {"members": model.members}):
            last = model.step + 10
        time.sleep(0.01)  # what is started meanwhile has the cores
        model(inputs).square().mean().backward()
        seen = {"agent": os.path.expandvars(sys.argv[2]), "pid": os.getpid()}
        seen["group"] = torch.distributed.get_world_size()
        Path(f"member{member}.part").write_text(json.dumps(seen | {"members": model.members}))
        Path(f"member{member}.part").rename(f"member{member}")
    model.global_avg()
    Path(f"result{member}").write_text(json.dumps([model.members, model.module.weight.tolist()]))
    model.close()

if __name__ == "__main__":
    BEGIN
"""


def script(folder: Path, name: str, begin: str, width: int = 4, mesh: str = "") -> Path:
    """The program, whose arguments say until when it trains, as Python, and the name of who has started it."""
    path = folder / name
    path.write_text(SCRIPT.replace("BEGIN", begin).replace("WIDTH", str(width)).replace("MESH", mesh))
    return path


def port_of(store: Running) -> int:
    """Of ``gossip store``, which has begun."""
    return int(re.findall(r":([0-9]+),", store.first_line())[0])


@contextlib.contextmanager
def served() -> Iterator[tuple[str, list[str]]]:
    """``gossip store`` within the block: its address on this machine, and the lines that it has printed."""
    with running(REPOSITORY, "store", "--port", "0", script=COMMAND) as store:
        yield f"127.0.0.1:{port_of(store)}", store.first_lines(3)
        os.kill(store.process.pid, signal.SIGTERM)
        assert store.finished().status == 0


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def files_of(folder: Path, *groups: int, size: int = 1) -> list[Path]:
    """What the ranks of these groups have written in their newest steps."""
    return [folder / f"member{group * size + place}" for group in groups for place in range(size)]


def trained_by(folder: Path, *groups: int, size: int = 1) -> bool:
    """Whether these have trained together, and nobody else with them."""
    files = files_of(folder, *groups, size=size)
    return all(file.exists() and read(file)["members"] == [*groups] for file in files)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def result_of(folder: Path) -> dict[int, list[int]]:
    """Who trained in the end, by rank; all have the same average."""
    found = {int(each.name.removeprefix("result")): read(each) for each in folder.glob("result*")}
    assert len({json.dumps(average) for _, average in found.values()}) == 1
    return {member: members for member, (members, _) in found.items()}

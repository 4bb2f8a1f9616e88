"""Programs of several ranks that end as programs do: every rank is an interpreter that is finalized for real."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_START = '''
import gc, json, os, sys, types
from functools import partial

import torch
from loguru import logger
from torch import nn

import gossip

logger.remove()
torch.set_num_threads(1)

# What is imported with the first model, once for all ranks.
with gossip.GossipDataParallel(nn.Linear(3, 1), partial(torch.optim.SGD, lr=0.1)) as model:
    model(torch.ones(2, 3)).sum().backward()
del model
gc.collect()
gc.freeze()  # the end of an interpreter would walk over all that was imported


def start_ranks():
    """Fork every rank of every world; a child gets what its program finds, and goes on to the end of this one."""
    cases, world_size, at_once = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    statuses = [{} for _ in cases]
    running = {}
    waiting = list(enumerate(cases))
    while waiting or running:
        while waiting and len(running) < at_once * world_size:
            number, case = waiting.pop(0)
            (heard, tell), (heard_back, tell_back) = os.pipe(), os.pipe()
            pipes = {"heard": heard, "tell": tell, "heard_back": heard_back, "tell_back": tell_back}
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    return {"number": number, "case": case, "rank": rank, "world_size": world_size, **pipes}
                running[pid] = number, rank
            for end in pipes.values():
                os.close(end)
        pid, status = os.wait()
        number, rank = running.pop(pid)
        statuses[number][rank] = os.waitstatus_to_exitcode(status)
    print(json.dumps(statuses), flush=True)
    os._exit(0)


def run_program(found):
    """In a main module of its own: what is frozen is not collected at the end."""
    program = types.ModuleType("__main__")
    vars(program).update(found)
    sys.modules["__main__"] = program
    with open("program.py") as file:
        source = file.read()
    exec(compile(source, "program.py", "exec"), vars(program))


run_program(start_ranks())
'''

_TOOLS = '''
import atexit, os, signal, sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import gossip


def build(timeout_s=60.0, module=None, **options):
    """Join the process group, over a file of its own, and wrap a module, by default a small one."""
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store{number}", rank=rank, world_size=world_size)
    sgd, timeout = partial(torch.optim.SGD, lr=0.1), timedelta(seconds=timeout_s)
    return gossip.GossipDataParallel(module or nn.Linear(3, 1), sgd, "complete", timeout=timeout, **options)


def train(model, num_steps):
    for _ in range(num_steps):
        model(torch.full((2, 3), 1.0 + rank)).sum().backward()
'''


class Ended(NamedTuple):
    """By world, each rank's exit status, below zero the signal that killed it; and what all of them wrote."""

    statuses: list[dict[int, int]]
    output: str


def run_programs(
    body: str,
    folder: Path,
    *,
    first: str = "",
    cases: Sequence[dict[str, object]] = ({},),
    world_size: int = 2,
    at_once: int = 2,
    timeout_s: float = 120,
) -> Ended:
    """Run the statements ``body`` on every rank of a world for each of the cases, some worlds ``at_once``.

    They find ``case``, ``rank`` and ``world_size``; ``build()``, which joins the process group and wraps a module;
    ``train(model, num_steps)``; and two pipes that all ranks of the world hold both ends of, ``heard, tell`` and
    ``heard_back, tell_back``. ``first`` comes before torch is imported, once for all ranks.
    """
    (folder / "start.py").write_text(first + _START)
    (folder / "program.py").write_text(_TOOLS + body)
    run = subprocess.run(
        [sys.executable, "start.py", json.dumps(list(cases)), str(world_size), str(at_once)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    found = [{int(rank): status for rank, status in each.items()} for each in json.loads(lines[-1])]
    return Ended(found, "\n".join([*lines[:-1], run.stderr]))

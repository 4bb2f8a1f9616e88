"""What a rank holds between steps, by mode, algorithm and compression: ``model.memory()``, in bytes per parameter.

    python scripts/memory_use.py

Four ranks train an MLP in float32 by the first of AdamW and SGD with and without momentum that the algorithm takes. All
columns but the last are what ``memory()`` says right after wrapping, on the rank that is to hold most, in all with what
readers that are behind can add; measured is what it says after eight steps, on the ranks that hold least and most. A
shard's bytes are divided by the parameters of the whole model. Other machines: no memory is shared.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn

from gossip import ALGORITHMS, COMPRESSIONS, Algorithm, Choco, DistributedTransport, GossipDataParallel, launch
from gossip.lab.experiments.training_methods import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
OPTIONS = {"period": 4, "parts": 2, "overlap": 2}
"""Of algorithms that have them: an exchange within eight steps."""
ELSEWHERE = {"transport": partial(DistributedTransport, shares_memory=False)}
COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "state of the optimizer": "optimizer",
    "state of the algorithm": "algorithm",
    "messages that others read on this machine": "read by others",
    "messages as sent, and what arrived": "sent and arrived",
}


def cases() -> dict[str, dict[str, Any]]:
    """The rows: arguments by name."""
    found: dict[str, dict[str, Any]] = {
        "default": {},
        "`step_in_backward=False`": {"step_in_backward": False},
        '`on_peer_loss="continue"`': {"on_peer_loss": "continue"},
        '`shard="none"`, groups of 2': {"shard": "none"},
        '`shard="optimizer"`, groups of 2': {"shard": "optimizer"},
        "`fully_shard`, groups of 2": {"shard": "fsdp"},
    }
    compressions = {name: name for name in COMPRESSIONS.available() if name not in ("none", "fp16")}
    for name, compression in {**compressions, "choco, signs": Choco(sparsifier="sign")}.items():
        is_static = name not in ("bf16", "int8", "int4")
        found[name] = {"compression": compression, **({"topology": "ring"} if is_static else {})}
    found |= {
        f"{name}, other machines": {**options, **ELSEWHERE}
        for name, options in found.items()
        if name in ("default", "bf16", "int8", "int4", "choco")
    }
    for name in ALGORITHMS.available():
        if name not in ("adapt_while_communicating", "awc", "atc"):
            make = ALGORITHMS.get(name)
            accepted = inspect.signature(make).parameters.keys() & OPTIONS.keys()
            found[f"`{name}`"] = for_algorithm(make(**{key: OPTIONS[key] for key in accepted}))
    found["`asynchronous`"]["on_peer_loss"] = "continue"
    return found


def wrapped(width: int, depth: int, shard: str | None = None, **options: Any) -> GossipDataParallel:
    """The model."""
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    group = {} if shard is None else grouped(module, 2, shard)
    return GossipDataParallel(module, bucket_cap_mb=5.0, **{"optimizer": ADAMW, **options, **group})


def for_algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """The algorithm, with an optimizer and a topology that it takes."""
    requires, refusal = algorithm.requires, ""
    topology = "path" if requires.tree else "complete" if requires.exact else "ring" if requires.static else ""
    for optimizer in (ADAMW, partial(torch.optim.SGD, lr=1e-4, momentum=0.9), torch.optim.SGD):
        try:
            algorithm.check_optimizers((optimizer(nn.Linear(1, 1).parameters()),))
        except ValueError as error:
            refusal = str(error)
        else:
            return {"algorithm": algorithm, "optimizer": optimizer, **({"topology": topology} if topology else {})}
    raise ValueError(refusal)


def measure(names: list[str], width: int, depth: int) -> list[tuple[str, list[int], int, int]]:
    """Runs on every rank: by case the topology, the bytes predicted by purpose, the spare, and those after steps."""
    logger.remove()
    found = []
    for options in map(cases().get, names):
        with wrapped(width, depth, **options) as model:
            memory = model.memory()
            for _ in range(8):
                model(torch.ones(1, width)).sum().backward()
                if options.get("step_in_backward") is False:
                    model.optimizer.step()
            predicted = [memory.in_training[purpose] or 0 for purpose in COLUMNS]
            found.append((model.topology.name, predicted, memory.num_spare_bytes, model.memory().num_bytes))
            dist.barrier()  # a rank that has ended does not answer
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="of a layer")
    parser.add_argument("--depth", type=int, default=2, help="layers")
    parser.add_argument("--cases", nargs="*", help="the rows, if not all")
    arguments = parser.parse_args()
    heads = ["", "topology", *COLUMNS.values(), "in all", "measured"]
    print(f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * (len(heads) - 2)}")
    names, num_parameters = arguments.cases or list(cases()), arguments.depth * arguments.width * (arguments.width + 1)
    by_rank = launch(measure, names, arguments.width, arguments.depth, world_size=4)
    for name, ranks in zip(names, zip(*by_rank, strict=True), strict=True):
        topology, predicted, spare, _ = max(ranks, key=lambda rank: sum(rank[1]))
        in_all, measured = sum(predicted), [num_bytes for *_, num_bytes in ranks]
        shown = [f"{num_bytes / num_parameters:.2f}" for num_bytes in predicted]
        for least, most in ((in_all, in_all + spare), (min(measured), max(measured))):
            bounds = (f"{num_bytes / num_parameters:.2f}" for num_bytes in (least, most))
            shown.append(" to ".join(dict.fromkeys(bounds)))
        print(f"| {name} | {topology} | {' | '.join(shown)} |")


if __name__ == "__main__":
    sys.exit(main())

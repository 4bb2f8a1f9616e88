"""What a rank holds of a replica that the ranks of a node train together, against a rank that trains one by itself.

    python scripts/sharded_memory.py

Two groups of 1, 2 and 4 ranks train an MLP of 127 MB by AdamW. At rest: between two steps. Peak: within three steps.
Both are resident memory above what the process held before it made the model, in sizes of the model's parameters
(float32): the parameters, two moments, and the messages of the ranks on this machine, which lie in memory that both
ends see. Memory that torch frees is given back to the system at once here, or the peak would be that of the allocator.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import nn

from gossip import GossipDataParallel, launch
from gossip.lab.benchmarks.network.counters import PeakMemory
from gossip.lab.experiments.training_methods import grouped

M_MMAP_THRESHOLD = -3  # of mallopt(3)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
BUCKET_CAP_MB = 6.0  # of a layer or two, as 25 are in a large model
CASES = {
    "each rank a replica": (1, None),
    "shard=none": (2, "none"),
    "shard=optimizer, 2 ranks": (2, "optimizer"),
    "shard=optimizer, 4 ranks": (4, "optimizer"),
    "fully_shard, 2 ranks": (2, "fsdp"),
    "fully_shard, 4 ranks": (4, "fsdp"),
}


def wrapped(module: nn.Sequential, local_size: int, shard: Any) -> GossipDataParallel:
    """The model of a rank of a group."""
    options = {} if shard is None else grouped(module, local_size, shard)
    return GossipDataParallel(module, ADAMW, "ring", bucket_cap_mb=BUCKET_CAP_MB, **options)


def measure(local_size: int, shard: str | None, width: int, depth: int) -> tuple[float, float]:
    """Runs on every rank: at rest and peak, in sizes of the parameters."""
    logger.remove()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    inputs = torch.randn(1, width)
    with wrapped(nn.Sequential(nn.Linear(width, 1)), local_size, shard) as small:  # loads what is loaded once
        for _ in range(3):
            small(inputs).sum().backward()
    memory = PeakMemory()
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    size = sum(parameter.nbytes for parameter in module.parameters())
    with wrapped(module, local_size, shard) as model:
        for _ in range(2):
            model(inputs).sum().backward()
        gc.collect()
        at_rest = memory.now()
        memory.restart()
        for _ in range(3):
            model(inputs).sum().backward()
        return at_rest / size, memory.bytes() / size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1152, help="of a layer")
    parser.add_argument("--depth", type=int, default=24, help="layers")
    arguments = parser.parse_args()
    print("| how a group shares a replica | at rest | peak |\n| --- | ---: | ---: |")
    for name, (local_size, shard) in CASES.items():
        found = launch(measure, local_size, shard, arguments.width, arguments.depth, world_size=2 * local_size)
        at_rest, peak = map(max, zip(*found, strict=True))
        print(f"| {name} | {at_rest:.2f} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Measure this cluster, and predict whether gossip helps on it and with which topology.

    gossip probe --world-size 4
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d --no-python gossip probe
    srun --nodes 4 --ntasks-per-node 8 gossip probe
    gossip probe --world-size 4 --parameters-mb 400 --batch-size 256 --data different --output probe.json

Every rank trains an MLP of the given size without communication: compute per step, and jitter. Pairs of ranks exchange
small and large messages: latency and bandwidth; once more while all compute: what the two cost each other.
gossip.simulate_time then predicts a step of all-reduce and of every topology that serves the world size, and with the
best one of every algorithm, compression and number of steps between exchanges that is worth it. Without torchrun or
srun the workers are started on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gossip import launch
from gossip.lab.probe import DATA_KINDS, Measured, advise, measure
from gossip.launching import find_placement

NUM_LAYERS = 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
}


def probe(arguments: argparse.Namespace) -> Measured:
    """Measure the cluster; runs on every rank."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    width = max(1, round(math.sqrt(arguments.parameters_mb * 1e6 / 4 / NUM_LAYERS)))
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    module = nn.Sequential(*layers).to(device)
    inputs = torch.randn(arguments.batch_size, width, device=device)
    return measure(
        module,
        lambda _: module(inputs).square().mean(),
        OPTIMIZERS[arguments.optimizer],
        num_steps=arguments.steps,
        bucket_cap_mb=arguments.bucket_cap_mb,
        message_bytes=round(arguments.message_mb * 1e6),
    )


def main() -> int:
    """Measure, predict and print; return exit status 0, or exit with 2 after a line about a wrong argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4, help="workers on this machine; torchrun and srun say it")
    parser.add_argument("--parameters-mb", type=float, default=16.0, help="of the MLP, in 10^6 bytes of float32")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="of the wrapper, in MiB")
    parser.add_argument("--message-mb", type=float, default=8.0, help="of the messages for the bandwidth")
    parser.add_argument(
        "--data",
        choices=DATA_KINDS,
        default="alike",
        help="whether all ranks draw from the same data, or each has its own",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one per rank, over nccl")
    parser.add_argument("--output", type=Path, help="a file for what was measured and predicted, as JSON")
    arguments = parser.parse_args()
    for name in ("world_size", "parameters_mb", "batch_size", "bucket_cap_mb", "message_mb"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(arguments, name)}")
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2, got {arguments.steps}")
    placement = find_placement()
    world_size = arguments.world_size if placement is None else placement.world_size
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    measured = launch(probe, arguments, world_size=world_size, backend=backend)[0]
    if placement is not None and placement.rank != 0:
        return 0
    advice = advise(measured, arguments.data)
    print(advice)
    if arguments.output is not None:
        content = {
            "cluster": asdict(measured.cluster),
            "workload": asdict(measured.workload),
            "predictions": [
                {"method": row.title, "step_time_s": row.run.step_time_s, "exposed_wait_s": row.run.exposed_wait_s}
                for row in advice.rows
            ],
            "choice": None if advice.choice is None else advice.choice.arguments(),
            "advice": advice.sentence,
        }
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0

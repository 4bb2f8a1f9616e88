"""One rank that is slower than the others: how fast all of them are, and how good the model is, after equal samples.

    python scripts/uneven_ranks.py
    python scripts/uneven_ranks.py --compute-ms 2 --seeds 10

Ranks train digits. Before each step a rank sleeps, as if a device computed; rank 0 so much longer than the others. In
step, all make as many steps; where they are not, each makes as many as its speed allows, and together they make as many
as the others. Speed: of all ranks together, to the sum of what each makes with no exchange. Accuracy is that of the
averaged model on held-out images.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossip
from gossip.lab.experiments.datasets import digits
from gossip.lab.experiments.evaluation import evaluate_together

WAYS = ("local", "ddp", "adapt_while_communicating", "asynchronous")
BATCH_SIZE = 16
LEARNING_RATE = 0.05
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Setting:
    """What all ways have in common."""

    world_size: int
    num_steps: int
    compute_s: float
    slowness: float
    width: int
    topology: str


class Outcome(NamedTuple):
    """Of one rank: steps per second, and the averaged model's accuracy."""

    speed: float
    accuracy: float


def num_steps_of(rank: int, way: str, setting: Setting) -> int:
    """In step, or as many as its speed allows."""
    if way != "asynchronous":
        return setting.num_steps
    speeds = [1 / setting.slowness, *[1.0] * (setting.world_size - 1)]
    return round(setting.num_steps * setting.world_size * speeds[rank] / sum(speeds))


def train(way: str, seed: int, setting: Setting) -> Outcome:
    """One rank's run."""
    rank, data = torch.distributed.get_rank(), digits()
    torch.manual_seed(seed)
    width = setting.width
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    module.append(nn.Linear(width, 10))
    make_optimizer = functools.partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(seed * setting.world_size + rank)
    compute_s = setting.compute_s * (setting.slowness if rank == 0 else 1.0)
    model: nn.Module = module
    if way == "ddp":
        model = DistributedDataParallel(module)
    elif way != "local":
        model = gossip.GossipDataParallel(
            module, make_optimizer, setting.topology, algorithm=way, on_peer_loss="continue", timeout=TIMEOUT
        )
    optimizer = None if isinstance(model, gossip.GossipDataParallel) else make_optimizer(module.parameters())
    torch.distributed.barrier()
    began = time.perf_counter()
    num_steps = num_steps_of(rank, way, setting)
    for _ in range(num_steps):
        chosen = torch.randint(len(data.train_inputs), (BATCH_SIZE,), generator=generator)
        time.sleep(compute_s)
        nn.functional.cross_entropy(model(data.train_inputs[chosen]), data.train_targets[chosen]).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    speed = num_steps / (time.perf_counter() - began)
    # A wrapper of its own for the others, which averages what they have.
    last = model if isinstance(model, gossip.GossipDataParallel) else gossip.GossipDataParallel(module, make_optimizer)
    last.global_avg()
    found = evaluate_together(module, data.test_inputs, data.test_targets, last.world)
    last.close()
    return Outcome(speed, found.accuracy)


def main() -> None:
    """Run all ways, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of every rank in step (%(default)d)")
    parser.add_argument("--compute-ms", type=float, default=50.0, help="of a step of the others (%(default)g)")
    parser.add_argument("--slowness", type=float, default=2.0, help="so many times as long on rank 0 (%(default)g)")
    parser.add_argument("--width", type=int, default=512, help="of the two hidden layers (%(default)d)")
    parser.add_argument("--topology", default="one_peer_exponential")
    parser.add_argument("--seeds", type=int, default=3, help="from 0 on (%(default)d)")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    setting = Setting(
        arguments.world_size,
        arguments.steps,
        arguments.compute_ms / 1000,
        arguments.slowness,
        arguments.width,
        arguments.topology,
    )
    runs: dict[str, list[list[Outcome]]] = {way: [] for way in WAYS}
    for seed in range(arguments.seeds):
        for way in WAYS:
            found = gossip.launch(train, way, seed, setting, world_size=setting.world_size, on_peer_loss="continue")
            runs[way].append(found)
    print("| method | steps/s of all ranks | relative to no exchange | accuracy, % | difference from ddp, points |")
    print("| --- | ---: | ---: | ---: | ---: |")
    own = [sum(outcome.speed for outcome in run) for run in runs["local"]]
    ddp = [run[0].accuracy for run in runs["ddp"]]
    for way, of_way in runs.items():
        speeds = [sum(outcome.speed for outcome in run) for run in of_way]
        shares = [speed / alone for speed, alone in zip(speeds, own, strict=True)]
        accuracies = [run[0].accuracy for run in of_way]
        differences = [100 * (mine - theirs) for mine, theirs in zip(accuracies, ddp, strict=True)]
        print(
            f"| {way} | {statistics.median(speeds):.1f} | {statistics.median(shares):.3f} ({min(shares):.3f} to "
            f"{max(shares):.3f}) | {100 * statistics.mean(accuracies):.2f} | {statistics.mean(differences):+.2f} "
            f"({min(differences):+.2f} to {max(differences):+.2f}) |"
        )


if __name__ == "__main__":
    main()

"""A step of all virtual workers, next to the same step by a loop over as many modules.

    python scripts/virtual_speed.py
    python scripts/virtual_speed.py --world-sizes 64 1024 10000 --topology base --device cuda

Both train the digits' MLP (64-64-10) by SGD with momentum and mix after every step. The loop's modules live in rows of
one tensor, so that its mixing is one sparse product too; its small operations run on one thread, which is faster than
several. Each way has a process of its own, and they take turns; printed are medians over all steps.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import topologies
from gossip import VirtualWorkers, launch
from gossip.virtual.mixing_products import known_rows, weighted_differences
from gossip.virtual.shards import Shard
from topologies import Topology

NUM_TURNS = 3
NUM_WARM_UP = 2  # steps at the beginning of each turn
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_module() -> nn.Module:
    """The digits' MLP."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Loop:
    """As many modules and optimizers as workers, in a loop."""

    def __init__(self, world_size: int, topology: Topology, device: torch.device) -> None:
        module = make_module().to(device)
        flat = nn.utils.parameters_to_vector(module.parameters()).detach()
        self.block = flat.repeat(world_size, 1)
        self.modules = [make_module().to(device) for _ in range(world_size)]
        for row, each in zip(self.block, self.modules, strict=True):
            nn.utils.vector_to_parameters(row, each.parameters())
        self.optimizers = [OPTIMIZER(each.parameters()) for each in self.modules]
        self.topology = topology
        self.difference: torch.Tensor | None = None
        self.shard = Shard(range(world_size), device, {}, {}, (self.block,))
        self.known_rows = known_rows([self.shard])
        self.step = 0

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of all."""
        some = zip(inputs.chunk(len(self.modules)), targets.chunk(len(self.modules)), strict=True)
        for module, (own_inputs, own_targets) in zip(self.modules, some, strict=True):
            module.zero_grad()
            functional.cross_entropy(module(own_inputs), own_targets).backward()
        if self.difference is not None:
            self.block += self.difference
        for optimizer in self.optimizers:
            optimizer.step()
        round_ = self.topology.round(self.step)
        (self.difference,) = weighted_differences(round_, [self.shard], [self.block], self.block.dtype, self.known_rows)
        self.step += 1


class Virtual:
    """The same training by virtual workers."""

    def __init__(self, world_size: int, topology: Topology, device: torch.device) -> None:
        self.workers = VirtualWorkers(make_module(), world_size, OPTIMIZER, topology, devices=[device])

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of all."""
        functional.cross_entropy(self.workers(inputs), targets).backward()

    @property
    def block(self) -> torch.Tensor:
        """The replicas' parameters, [n, numel]."""
        return torch.cat([each.detach().flatten(1) for each in self.workers.parameters()], 1)


def measure(world_size: int, arguments: argparse.Namespace) -> float:
    """Runs on every rank, each of which trains in its own way: median seconds of a step."""
    rank, device = dist.get_rank(), torch.device(arguments.device)
    if rank == 1:
        torch.set_num_threads(1)
    way = (Virtual, Loop)[rank](world_size, topologies.build(arguments.topology, world_size), device)
    torch.manual_seed(1)
    inputs = torch.randn(world_size * arguments.batch_size, 64, device=device)
    targets = torch.randint(10, (len(inputs),), device=device)
    times: list[float] = []
    for turn in range(1 + NUM_TURNS):
        for each in range(dist.get_world_size()):
            dist.barrier()
            num_steps = NUM_WARM_UP + (arguments.repetitions if turn > 0 else 0)
            for step in range(num_steps if each == rank else 0):
                start = time.perf_counter()
                way(inputs, targets)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times += [time.perf_counter() - start] if step >= NUM_WARM_UP else []
        if turn == 0:  # the same training: else there is nothing to compare
            block = way.block.cpu()
            first = block.clone()
            dist.broadcast(first, 0)
            assert torch.allclose(block, first, atol=1e-4), "the two ways have trained apart"
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 10000])
    parser.add_argument("--topology", default="one_peer_exponential")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=5, help="steps in each turn")
    parser.add_argument("--loop-up-to", type=int, default=1024, help="workers; with more, the loop is left out")
    arguments = parser.parse_args()
    if min(arguments.repetitions, arguments.batch_size, *arguments.world_sizes) < 1:
        parser.error("--repetitions, --batch-size and --world-sizes must be at least 1")
    threads = torch.get_num_threads()
    print(f"{arguments.topology}, {arguments.batch_size} samples per worker, {arguments.device}, {threads} threads\n")
    print("| workers | virtual | loop | times as fast |\n| ---: | ---: | ---: | ---: |")
    for world_size in arguments.world_sizes:
        num_ways = 2 if world_size <= arguments.loop_up_to else 1
        virtual_s, *loops_s = launch(measure, world_size, arguments, world_size=num_ways, num_threads=threads)
        loop = (f"{1e3 * loops_s[0]:.1f} ms", f"{loops_s[0] / virtual_s:.1f}") if loops_s else ("-", "-")
        print(f"| {world_size} | {1e3 * virtual_s:.1f} ms | {' | '.join(loop)} |", flush=True)


if __name__ == "__main__":
    main()

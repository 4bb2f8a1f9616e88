"""Replicas spread over several devices train as on one, in four copies of memory, and mix as by the dense product."""

import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from covering import covering
from live_memory import LiveBytes
from separate import TINY_BUCKETS, batch, make_module, make_workers, stacked, train
from torch import nn

import topologies
from gossip import VirtualWorkers
from gossip.virtual.mixing_products import known_rows, weighted_differences
from gossip.virtual.shards import Shard
from topologies import Round

WORLD_SIZE = 8
ROUNDS = {
    "directed": topologies.build("directed_ring", WORLD_SIZE),
    "one group, or none": topologies.build("complete", WORLD_SIZE).every(2),
    "star": topologies.build("star", WORLD_SIZE),
}
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def run(workers: VirtualWorkers) -> VirtualWorkers:
    for step in range(4):
        train(workers, batch(13 if step != 2 else 3, seed=step))
    return workers


@pytest.mark.parametrize(
    ("world_size", "options", "atol"),
    [
        *((WORLD_SIZE, {"topology": rounds, "optimizer": ADAM}, 1e-12) for rounds in ROUNDS.values()),
        *((5, {"topology": "ring", "compression": each}, 1e-9) for each in ("bf16", "int8", "choco", "powergossip")),
    ],
)
def test_several_devices_train_as_one(world_size: int, options: dict[str, Any], atol: float) -> None:
    one, several = (run(make_workers(make_module(), world_size, devices=["cpu"] * n, **options)) for n in (1, 3))
    for name, values in stacked(one).items():
        torch.testing.assert_close(stacked(several)[name], values, rtol=0, atol=atol)
    assert several.consensus_distance() == pytest.approx(one.consensus_distance(), rel=1000 * atol)
    assert several.stats() == one.stats()


def test_an_optimizer_that_has_trained_has_counters_on_every_device() -> None:
    module = make_module()
    built = torch.optim.Adam(module.parameters(), lr=0.01)
    module(batch(4)).square().mean().backward()
    built.step()
    built.zero_grad()
    steps = [entry["step"].clone() for entry in built.state.values()]
    workers = VirtualWorkers(module, 3, built, devices=["cpu"] * 3, bucket_cap_mb=TINY_BUCKETS)
    assert [float(entry["step"]) for entry in built.state.values()] == [1.0] * 12
    assert [float(each) for each in steps] == [1.0] * 4
    train(workers, batch(6))
    assert [float(entry["step"]) for entry in built.state.values()] == [2.0] * 12


GROUPS = {
    "large groups": Round.from_groups(20, [range(9), range(9, 12)]),  # of different sizes, and ranks that are alone
    "small groups": Round.from_groups(20, [range(3), range(5, 10)]),
    "weights": topologies.build("star", 20).round(0),
    "one way": topologies.build("directed_ring", 20).round(0),
}
PARTS = {"one shard": [range(20)], "three shards": [range(7), range(7, 8), range(8, 20)]}


@pytest.mark.parametrize("round_", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_differences_are_those_of_the_matrix(round_: Round, parts: list[range]) -> None:
    values = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shards = [Shard(ranks, torch.device("cpu"), {}, {}) for ranks in parts]
    messages = [values[ranks.start : ranks.stop] for ranks in parts]
    found = weighted_differences(round_, shards, messages, torch.float64, known_rows(shards))
    wanted = torch.from_numpy(round_.matrix()) @ values - values
    torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-14)


NUM_REPLICAS = 64
SCRATCH = 0.05
"""What else there may be, in copies: activations of one sample a replica, and the weights of a round."""


def one_large_parameter() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 1000, bias=False), nn.Linear(1000, 1, bias=False))


def many_parameters() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(31, 31), nn.Tanh())])


@pytest.mark.parametrize(
    ("make", "topology", "clip_grad_norm"),
    covering(
        itertools.product(
            (one_large_parameter, many_parameters), ("one_peer_exponential", "ring", "complete"), (None, 1.0)
        )
    ),
)
def test_four_copies(make: Any, topology: str, clip_grad_norm: float | None) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    gc.collect()
    with LiveBytes() as memory:
        module = make()
        workers = VirtualWorkers(
            module, NUM_REPLICAS, sgd, topology, clip_grad_norm=clip_grad_norm, bucket_cap_mb=1.0, devices=["cpu"]
        )
        copy_bytes = sum(stack.nbytes for stack in workers.parameters())
        memory.peak = memory.now
        inputs = torch.ones(NUM_REPLICAS, next(module.parameters()).shape[1])
        for _ in range(4):
            workers(inputs).square().mean().backward()
        peak, after = memory.peak, memory.now
    assert after / copy_bytes > 3, "parameters, momentum, and a message stay: else nothing was counted"
    # In the backward pass autograd copies one parameter's gradient at a time, where that came out transposed.
    largest = max(stack.nbytes for stack in workers.parameters()) / copy_bytes
    assert peak / copy_bytes < 4 + largest + SCRATCH

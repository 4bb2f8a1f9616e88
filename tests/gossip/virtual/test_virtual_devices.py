"""Replicas spread over several devices train as on one, and in how much memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from separate import TINY_BUCKETS, assert_equal_states, batch, make_module, make_workers, stacked, train, trained_alike
from torch import nn

import topologies
from gossip import VirtualWorkers

WORLD_SIZE = 8
ROUNDS = {
    "pairs": topologies.build("one_peer_exponential", WORLD_SIZE),
    "weights": topologies.build("ring", WORLD_SIZE),
    "directed": topologies.build("directed_ring", WORLD_SIZE),
    "one group": topologies.build("complete", WORLD_SIZE),
    "identity": topologies.build("complete", WORLD_SIZE).every(2),
    "random": topologies.build("random_matching", WORLD_SIZE),
    "star": topologies.build("star", WORLD_SIZE),
}


def run(workers: VirtualWorkers) -> VirtualWorkers:
    for step in range(4):
        train(workers, batch(13 if step != 2 else 3, seed=step))
    return workers


@pytest.mark.parametrize("rounds", ROUNDS)
def test_kinds_of_rounds(rounds: str) -> None:
    optimizer = functools.partial(torch.optim.Adam, lr=0.01)
    one = run(make_workers(make_module(), WORLD_SIZE, optimizer, ROUNDS[rounds]))
    several = run(make_workers(make_module(), WORLD_SIZE, optimizer, ROUNDS[rounds], devices=["cpu"] * 3))
    for name, values in stacked(one).items():
        torch.testing.assert_close(stacked(several)[name], values, rtol=0, atol=1e-12)
    assert several.consensus_distance() == pytest.approx(one.consensus_distance(), rel=1e-9)
    assert several.stats() == one.stats()


@pytest.mark.parametrize("compression", ["bf16", "int8", "choco", "powergossip"])
def test_compressions(compression: str) -> None:
    one, several = (
        run(make_workers(make_module(), 5, topology="ring", compression=compression, devices=["cpu"] * each))
        for each in (1, 3)
    )
    for name, values in stacked(one).items():
        torch.testing.assert_close(stacked(several)[name], values, rtol=0, atol=1e-9)
    assert several.stats() == one.stats()


@pytest.mark.parametrize("arguments", [{"clip_grad_norm": 0.05}, {"buffers": "average"}, {"optimizer": None}])
def test_arguments(arguments: dict[str, Any]) -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.norm(self.layer(inputs))
            return output

    states = []
    for devices in (1, 2, 3):
        workers = make_workers(Normalised().double(), 5, **(arguments | {"devices": ["cpu"] * devices}))
        for step in range(3):
            train(workers, batch(14, seed=step))
        with workers.averaged() as module:
            mean = {name: values.clone() for name, values in module.state_dict().items()}
        workers.global_avg()
        assert_equal_states(dict(workers.replica(4).state_dict()), mean)
        states.append(mean)
    for state in states[1:]:
        for name, values in states[0].items():
            torch.testing.assert_close(state[name], values, rtol=0, atol=1e-12)


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


def test_names_come_once_for_each_device() -> None:
    workers = make_workers(make_module(), 5, devices=["cpu", "cpu"])
    named = list(workers.named_parameters())
    assert [(name, len(stack)) for name, stack in named[:2]] == [("0.weight", 2), ("0.weight", 3)]
    groups = workers.optimizer.param_groups
    assert len(groups[0]["params"]) == len(groups[0]["param_names"]) == 8
    assert workers.every(batch(4)).shape == (5, 4, 2)


def test_one_after_the_other_on_several_devices() -> None:
    class Branching(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = super().forward(input)
            return output if float(output.detach().sum()) > 0 else 2 * output

    torch.manual_seed(0)
    assert not trained_alike(Branching(3, 2).double(), 5, devices=["cpu"] * 2).is_vectorised

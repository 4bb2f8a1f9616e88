"""Virtual workers against real processes on gloo, for every topology family, algorithm and compression."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from cases import topology_cases
from compressions import COMPRESSIONS
from torch import nn

from gossip import Algorithm, Compression, GossipDataParallel, VirtualWorkers, launch
from gossip.algorithms import AdaptThenCombine, AdaptWhileCommunicating
from topologies import Topology

NUM_STEPS = 20
WORLD_SIZES = (4, 5)
TOLERANCES = {"float32": 1e-5, "float64": 1e-11}
ALGORITHMS: dict[str, type[Algorithm]] = {
    "adapt_while_communicating": AdaptWhileCommunicating,
    "adapt_then_combine": AdaptThenCombine,
}
LOSSY = tuple(name for name in COMPRESSIONS if name != "none")
LOSSES = "losses"
BUCKET_CAP_MB = 600 / 2**20  # one bucket in float32, two in float64
Case = tuple[str, str, str, str]
"""Names of topology, algorithm, compression and dtype."""


@functools.cache
def served(world_size: int) -> dict[str, Topology]:
    return topology_cases(world_size)


def make_cases(world_size: int) -> list[Case]:
    exact = list(itertools.product(served(world_size), ALGORITHMS, ("none",), TOLERANCES))
    lossy = [
        (topology, algorithm, compression, "float64")
        for topology, compression in itertools.product(("ring()", "complete()", "random_matching(seed=3)"), LOSSY)
        for algorithm in ALGORITHMS
        if topology.partition("(")[0] in COMPRESSIONS[compression].topologies
    ]
    return exact + lossy


def make_rounded_cases() -> list[Case]:
    """In float32 a rounding may tip a lossy message over: the curves of the loss stay together, not every number."""
    return [("ring()", "adapt_while_communicating", compression, "float32") for compression in LOSSY]


def make_module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3)).to(dtype)


@functools.cache
def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.randint(3, (4,), generator=generator)


def constants_of(case: Case, world_size: int) -> tuple[Topology, dict[str, Algorithm | Compression | float]]:
    topology, algorithm, compression, _ = case
    constants: dict[str, Algorithm | Compression | float] = {"algorithm": ALGORITHMS[algorithm]()}
    constants |= {"compression": COMPRESSIONS[compression].make(3), "bucket_cap_mb": BUCKET_CAP_MB}
    return served(world_size)[topology], constants


OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def train_processes(world_size: int) -> dict[Case, dict[str, np.ndarray]]:
    """Runs on every rank: this rank's parameters after every case, and its losses."""
    results = {}
    for case in [*make_cases(world_size), *make_rounded_cases()]:
        losses = []
        dtype = getattr(torch, case[3])
        topology, constants = constants_of(case, world_size)
        with GossipDataParallel(make_module(dtype), OPTIMIZER, topology, **constants) as model:  # type: ignore[arg-type]
            for step in range(NUM_STEPS):
                inputs, targets = batch(model.rank, step)
                loss = nn.functional.cross_entropy(model(inputs.to(dtype)), targets)
                loss.backward()
                losses.append(loss.item())
            results[case] = {name: values.numpy().copy() for name, values in model.state_dict().items()}
            results[case][LOSSES] = np.array(losses)
    return results


@functools.cache
def of_processes(world_size: int) -> dict[Case, dict[str, np.ndarray]]:
    """Parameters after every case, [n, *shape], and losses, [n, steps]; one set of processes for a world size."""
    by_rank = launch(train_processes, world_size, world_size=world_size)
    return {
        case: {name: np.stack([results[case][name] for results in by_rank]) for name in by_rank[0][case]}
        for case in by_rank[0]
    }


def train_virtual(case: Case, world_size: int) -> dict[str, np.ndarray]:
    """Parameters, [n, *shape], and the mean losses, [steps]."""
    losses = []
    dtype = getattr(torch, case[3])
    topology, constants = constants_of(case, world_size)
    workers = VirtualWorkers(make_module(dtype), world_size, OPTIMIZER, topology, devices=["cpu"], **constants)  # type: ignore[arg-type]
    for step in range(NUM_STEPS):
        batches = [batch(rank, step) for rank in range(world_size)]
        inputs = torch.cat([inputs for inputs, _ in batches]).to(dtype)
        targets = torch.cat([targets for _, targets in batches])
        loss = nn.functional.cross_entropy(workers(inputs), targets)
        loss.backward()
        losses.append(loss.item())
    assert workers.is_vectorised
    parameters = {name: values.detach().numpy() for name, values in workers.named_parameters()}
    return parameters | {LOSSES: np.array(losses)}


def check(case: Case, world_size: int) -> None:
    wanted, actual = of_processes(world_size)[case], train_virtual(case, world_size)
    assert actual.keys() == wanted.keys()
    for name in wanted.keys() - {LOSSES}:
        values = wanted[name]
        error = np.abs(actual[name] - values).max() / np.abs(values).max()
        assert error <= TOLERANCES[case[3]], name


CASES = [
    pytest.param(
        world_size, case, marks=pytest.mark.xdist_group(f"virtual{world_size}"), id=f"{world_size}-{'-'.join(case)}"
    )
    for world_size in WORLD_SIZES
    for case in make_cases(world_size)
]


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_parameters_equal_those_of_processes(world_size: int, case: Case) -> None:
    check(case, world_size)


ROUNDED = [
    pytest.param(size, case, marks=pytest.mark.xdist_group(f"virtual{size}"), id=f"{size}-{case[2]}")
    for size in WORLD_SIZES
    for case in make_rounded_cases()
]


@pytest.mark.parametrize(("world_size", "case"), ROUNDED)
def test_lossy_messages_give_the_losses_of_processes(world_size: int, case: Case) -> None:
    wanted, actual = of_processes(world_size)[case][LOSSES].mean(0), train_virtual(case, world_size)[LOSSES]
    np.testing.assert_allclose(actual, wanted, rtol=1e-3)

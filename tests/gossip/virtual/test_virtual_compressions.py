"""Virtual workers against real processes on gloo, for each way of compressing; test_oracle.py has the others."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from cases import topology_cases
from compressions import COMPRESSIONS, PER_MECHANISM
from covering import covering
from ranks import run_ranks
from torch import nn

from gossip import Compression, GossipDataParallel, VirtualWorkers
from topologies import Topology

NUM_STEPS = 10
WORLD_SIZES = (4, 5)
TOLERANCE = 1e-11
ALGORITHMS = ("adapt_while_communicating", "adapt_then_combine")
LOSSES = "losses"
BUCKET_CAP_MB = 600 / 2**20  # one bucket in float32, two in float64
Case = tuple[int, str, str, str, str]
"""World size, and names of topology, algorithm, compression and dtype."""

# All pairs of the first four, of those that can be.
CASES: list[Case] = covering(
    (world_size, topology, algorithm, compression, "float64")
    for world_size in WORLD_SIZES
    for topology in ("ring()", "complete()", "random_matching(seed=3)")
    for algorithm, compression in itertools.product(ALGORITHMS, PER_MECHANISM)
    if topology.partition("(")[0] in COMPRESSIONS[compression].topologies
)
# In float32 a rounding may tip a lossy message over: the curves of the loss stay together, not every number.
ROUNDED: list[Case] = [
    (4, "ring()", "adapt_while_communicating", compression, "float32") for compression in PER_MECHANISM
]


def make_module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3)).to(dtype)


@functools.cache
def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.randint(3, (4,), generator=generator)


def constants_of(case: Case) -> tuple[Topology, dict[str, str | Compression | float]]:
    world_size, topology, algorithm, compression, _ = case
    constants: dict[str, str | Compression | float] = {"algorithm": algorithm}
    constants |= {"compression": COMPRESSIONS[compression].make(4), "bucket_cap_mb": BUCKET_CAP_MB}
    return topology_cases(world_size)[topology], constants


OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def train_processes(world_size: int) -> dict[Case, dict[str, np.ndarray]]:
    """Runs on every rank: this rank's parameters after every case, and its losses."""
    results = {}
    for case in [*CASES, *ROUNDED]:
        if case[0] != world_size:
            continue
        losses = []
        dtype = getattr(torch, case[-1])
        topology, constants = constants_of(case)
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
    by_rank = run_ranks(train_processes, world_size, world_size=world_size)
    return {
        case: {name: np.stack([results[case][name] for results in by_rank]) for name in by_rank[0][case]}
        for case in by_rank[0]
    }


def train_virtual(case: Case) -> dict[str, np.ndarray]:
    """Parameters, [n, *shape], and the mean losses, [steps]."""
    losses = []
    world_size, dtype = case[0], getattr(torch, case[-1])
    topology, constants = constants_of(case)
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


def grouped(cases: list[Case]) -> pytest.MarkDecorator:
    """The cases of a world size run where its processes were."""
    parameters = [
        pytest.param(case, marks=pytest.mark.xdist_group(f"virtual{case[0]}"), id="-".join(map(str, case)))
        for case in cases
    ]
    return pytest.mark.parametrize("case", parameters)


@grouped(CASES)
def test_parameters_equal_those_of_processes(case: Case) -> None:
    wanted, actual = of_processes(case[0])[case], train_virtual(case)
    assert actual.keys() == wanted.keys()
    for name in wanted.keys() - {LOSSES}:
        values = wanted[name]
        error = np.abs(actual[name] - values).max() / np.abs(values).max()
        assert error <= TOLERANCE, name


@grouped(ROUNDED)
def test_lossy_messages_give_the_losses_of_processes(case: Case) -> None:
    wanted, actual = of_processes(case[0])[case][LOSSES].mean(0), train_virtual(case)[LOSSES]
    np.testing.assert_allclose(actual, wanted, rtol=1e-3)

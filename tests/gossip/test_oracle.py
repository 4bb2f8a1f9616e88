"""Real processes on gloo against the dense recursion, for every topology family, dtype and optimizer."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from cases import WORLD_SIZES, topology_cases
from covering import covering
from recursion import AdamW, Momentum, dense_recursion
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import topologies
from gossip import GossipDataParallel, launch

NUM_STEPS = 10
DTYPES = {"float32": (torch.float32, 1e-5), "float64": (torch.float64, 1e-11)}
OPTIMIZERS = {
    "momentum": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), Momentum),
    "adamw": (functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), AdamW),
}
# 71 bytes: most parameters alone, larger than the bucket; 200: some share one unevenly.
BUCKET_BYTES = {"float32": 71, "float64": 200}

Case = tuple[int, str, str, str]
"""World size, and names of topology, dtype and optimizer."""


# Every topology at every size that it serves, in some dtype with some optimizer: all pairs of the four.
CASES: list[Case] = covering(
    (world_size, label, dtype_name, optimizer_name)
    for world_size in WORLD_SIZES
    for label in topology_cases(world_size)
    for dtype_name in DTYPES
    for optimizer_name in OPTIMIZERS
)
GROUPED = [pytest.param(case, marks=pytest.mark.xdist_group(f"oracle{case[0]}")) for case in CASES]


def make_module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).to(
        dtype
    )


def make_batch(rank: int, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (6,), generator=generator)
    return inputs.to(dtype), targets


def loss_of(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    inputs, targets = make_batch(rank, step, dtype)
    return nn.functional.cross_entropy(module(inputs), targets)


def cases_of(world_size: int) -> list[Case]:
    return [case for case in CASES if case[0] == world_size]


def train_cases(world_size: int) -> dict[Case, np.ndarray]:
    """Runs on every rank: this rank's parameters, flat, after every case."""
    results = {}
    for case in cases_of(world_size):
        _, label, dtype_name, optimizer_name = case
        dtype = DTYPES[dtype_name][0]
        model = GossipDataParallel(
            make_module(dtype),
            OPTIMIZERS[optimizer_name][0],
            topology_cases(world_size)[label],
            bucket_cap_mb=BUCKET_BYTES[dtype_name] / 2**20,
        )
        for step in range(NUM_STEPS):
            loss_of(model, model.rank, step, dtype).backward()
        results[case] = parameters_to_vector(model.parameters()).detach().numpy()
        model.close()
    return results


@functools.cache
def distributed_results(world_size: int) -> dict[Case, np.ndarray]:
    """Parameters after every case, [n, numel]; one set of processes for all cases of a world size."""
    by_rank = launch(train_cases, world_size, world_size=world_size)
    return {case: np.stack([results[case] for results in by_rank]) for case in by_rank[0]}


def dense_results(case: Case) -> np.ndarray:
    """The same, by the recursion."""
    world_size, label, dtype_name, optimizer_name = case
    module = make_module(DTYPES[dtype_name][0]).double()

    def gradient(rank: int, step: int, x: np.ndarray) -> np.ndarray:
        vector_to_parameters(torch.from_numpy(x), module.parameters())
        module.zero_grad()
        loss_of(module, rank, step, torch.float64).backward()
        return torch.cat([parameter.grad.flatten() for parameter in module.parameters()]).numpy()

    start = parameters_to_vector(module.parameters()).detach().numpy().copy()
    topology = topology_cases(world_size)[label]
    return dense_recursion(topology, start, gradient, OPTIMIZERS[optimizer_name][1](), NUM_STEPS)


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: "-".join(map(str, case)))
def test_parameters_equal_dense_recursion(case: Case) -> None:
    actual, wanted = distributed_results(case[0])[case], dense_results(case)
    tolerance = DTYPES[case[2]][1]
    sizes = [parameter.numel() for parameter in make_module(torch.float64).parameters()]
    ends = np.cumsum(sizes)
    for begin, end in zip(ends - sizes, ends, strict=True):
        error = np.abs(actual[:, begin:end] - wanted[:, begin:end]).max() / np.abs(wanted[:, begin:end]).max()
        assert error <= tolerance
    # Doubly stochastic mixing does not move the mean over ranks.
    np.testing.assert_allclose(actual.mean(0), wanted.mean(0), rtol=0, atol=tolerance * np.abs(wanted).max())


def test_cases_cover_every_family() -> None:
    chosen = [topology_cases(world_size)[label] for world_size, label, _, _ in CASES]
    assert {topology.name for topology in chosen if topology.registered} == set(topologies.available())
    assert {len(topology.phases) for topology in chosen} == {1, 2, 3}

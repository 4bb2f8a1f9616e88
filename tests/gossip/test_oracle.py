"""Virtual workers and real processes on gloo against the dense recursion, for every topology family."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from covering import covering
from ranks import run_ranks
from small_runs import rows_after
from torch import nn
from torch.nn.utils import parameters_to_vector

import topologies
from gossip import GossipDataParallel, VirtualWorkers
from topologies import Topology

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@functools.cache
def topology_cases(world_size: int) -> dict[str, Topology]:
    """Of every family what it can be for ``world_size``, and compositions, by name."""
    cases = {topology.name: topology for topology in compositions(world_size)}
    for name in topologies.available():
        for number, topology in enumerate(topologies.variants(name, world_size)):
            cases[f"{name}({number})"] = topology
    return cases


def compositions(world_size: int) -> tuple[Topology, ...]:
    """Schedules with local steps and warm-ups: over communicators, point-to-point, and both in turn."""
    complete, ring, exponential, matching = (
        topologies.build(name, world_size) for name in ("complete", "ring", "one_peer_exponential", "random_matching")
    )
    halves = (
        () if world_size % 2 else (topologies.build("star", world_size // 2).product(topologies.build("complete", 2)),)
    )
    return (
        *halves,
        exponential.permuted(range(world_size)[::-1]),
        exponential.interleave(matching),
        exponential.every(3),
        complete.then(ring.every(2), after=4),
        matching.every(2).then(complete.then(exponential, after=2), after=5),
    )


def updates_by(make: Callable[..., torch.optim.Optimizer]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Those of all ranks' values, [n, numel], by one optimizer, which updates each element by itself."""
    values = nn.Parameter(torch.empty(0, dtype=torch.float64))
    optimizer = make([values])

    def update(x: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        values.data, values.grad = torch.from_numpy(x.copy()), torch.from_numpy(gradients)
        optimizer.step()
        return values.detach().numpy()

    return update


NUM_STEPS = 10
ALGORITHMS = ("adapt_while_communicating", "adapt_then_combine")
DTYPES = {"float32": (torch.float32, 1e-5), "float64": (torch.float64, 1e-11)}
OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
}
# 71 bytes: most parameters alone, some larger than the bucket; 300: they share three unevenly.
BUCKET_BYTES = {"float32": 71, "float64": 300}


class Case(NamedTuple):
    """A run, by its world size and the names of its parts."""

    world_size: int
    topology: str
    algorithm: str
    dtype: str
    optimizer: str

    @property
    def tolerance(self) -> float:
        return DTYPES[self.dtype][1]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype][0]

    def arguments(self) -> dict[str, Any]:
        """Of the wrapper, and of virtual workers."""
        return {
            "module": make_module(self.torch_dtype),
            "optimizer": OPTIMIZERS[self.optimizer],
            "topology": topology_cases(self.world_size)[self.topology],
            "algorithm": self.algorithm,
            "bucket_cap_mb": BUCKET_BYTES[self.dtype] / 2**20,
        }


# Those where a size decides who meets whom, and how often: at 2, both neighbours of a ring are one rank.
AT_EVERY_SIZE = ("complete(0)", "ring(0)", "one_peer_exponential(0)", "complete.then(ring.every(2), after=4)")


def sizes(topology: str) -> Sequence[int]:
    """Two sizes, one odd and one even if it serves both: above 3 if it can, with many rounds, and small."""
    num_rounds = {}
    for world_size in WORLD_SIZES:
        if topology in topology_cases(world_size):
            rounds = map(topology_cases(world_size)[topology].round, range(NUM_STEPS))
            num_rounds[world_size] = len({round_.matrix().tobytes() for round_ in rounds})
    if topology in AT_EVERY_SIZE or len(num_rounds) == 1:
        return list(num_rounds)

    def merits(world_size: int) -> tuple[bool, int, int]:
        return world_size > 3, num_rounds[world_size], -world_size

    first = max(num_rounds, key=merits)
    others = num_rounds.keys() - {first}
    return first, max(others, key=lambda each: (each > 1, (each - first) % 2, merits(each)))


TOPOLOGIES = tuple(dict.fromkeys(name for world_size in WORLD_SIZES for name in topology_cases(world_size)))
# All pairs of the five, of those that can be.
CASES = covering(
    Case(world_size, topology, *others)
    for topology in TOPOLOGIES
    for world_size in sizes(topology)
    for others in itertools.product(ALGORITHMS, DTYPES, OPTIMIZERS)
)
# How ranks that each know their own row exchange messages costs several times as much: at the first size alone.
IN_PROCESSES = [case for case in CASES if case.topology in AT_EVERY_SIZE or case.world_size == sizes(case.topology)[0]]


IN_TIER = {size: [pytest.mark.slow] * (size == max(WORLD_SIZES)) for size in WORLD_SIZES}


def make_module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


@functools.cache
def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (6,), generator=generator)
    return inputs.to(dtype), targets


def loss_of(module: Any, ranks: range, step: int, dtype: torch.dtype) -> torch.Tensor:
    """The mean over the samples of some ranks."""
    inputs, targets = zip(*(batch(rank, step, dtype) for rank in ranks), strict=True)
    return nn.functional.cross_entropy(module(torch.cat(inputs)), torch.cat(targets))


def train_cases(world_size: int) -> dict[Case, np.ndarray]:
    """Runs on every rank: this rank's parameters, flat, after every case."""
    results = {}
    for case in IN_PROCESSES:
        if case.world_size == world_size:
            with GossipDataParallel(**case.arguments()) as model:
                for step in range(NUM_STEPS):
                    loss_of(model, range(model.rank, model.rank + 1), step, case.torch_dtype).backward()
                results[case] = parameters_to_vector(model.parameters()).detach().numpy()
    return results


@functools.cache
def distributed_results(world_size: int) -> dict[Case, np.ndarray]:
    """Parameters after every case, [n, numel]; one set of processes for all cases of a world size."""
    by_rank = run_ranks(train_cases, world_size, world_size=world_size)
    return {case: np.stack([results[case] for results in by_rank]) for case in by_rank[0]}


@functools.cache
def dense_results(case: Case) -> np.ndarray:
    """The same, by the recursion."""
    return rows_after(
        range(NUM_STEPS),
        case.world_size,
        make=lambda: make_module(case.torch_dtype).double(),
        loss=lambda module, rank, step: loss_of(module, range(rank, rank + 1), step, torch.float64),
        topology=topology_cases(case.world_size)[case.topology],
        update=updates_by(OPTIMIZERS[case.optimizer]),
        combines_first=case.algorithm == "adapt_then_combine",
    )


def assert_equals_dense_recursion(actual: np.ndarray, case: Case) -> None:
    """Each parameter's largest error is within the tolerance of its largest value."""
    wanted = dense_results(case)
    sizes = [parameter.numel() for parameter in make_module(torch.float64).parameters()]
    for values, right in zip(
        *(np.split(rows, np.cumsum(sizes)[:-1], axis=1) for rows in (actual, wanted)), strict=True
    ):
        assert np.abs(values - right).max() / np.abs(right).max() <= case.tolerance
    # Doubly stochastic mixing does not move the mean over ranks.
    np.testing.assert_allclose(actual.mean(0), wanted.mean(0), rtol=0, atol=case.tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_virtual_workers_equal_dense_recursion(case: Case) -> None:
    workers = VirtualWorkers(world_size=case.world_size, devices=["cpu"], **case.arguments())
    for step in range(NUM_STEPS):
        loss_of(workers, range(case.world_size), step, case.torch_dtype).backward()
    assert workers.is_vectorised
    actual = torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1)
    assert_equals_dense_recursion(actual.numpy(), case)


@pytest.mark.parametrize(
    "case",
    [
        # Those of a size share their processes.
        pytest.param(case, marks=[pytest.mark.xdist_group(f"oracle{case.world_size}"), *IN_TIER[case.world_size]])
        for case in IN_PROCESSES
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_processes_equal_dense_recursion(case: Case) -> None:
    assert_equals_dense_recursion(distributed_results(case.world_size)[case], case)


def test_cases_cover_every_family() -> None:
    for cases in (CASES, IN_PROCESSES):
        chosen = [topology_cases(case.world_size)[case.topology] for case in cases]
        assert {topology.name for topology in chosen if topology.registered} == set(topologies.available())
        assert {len(topology.phases) for topology in chosen} == {1, 2, 3}
        assert {case.world_size for case in cases} == set(WORLD_SIZES)
    assert {case[1:3] for case in CASES} == set(itertools.product(TOPOLOGIES, ALGORITHMS))

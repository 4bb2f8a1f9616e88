"""Muon on a matrix beside SGD on the rest, in every algorithm that takes an optimizer with momentum: MuLoCo, DeMuon."""

import copy
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithm_table import ROWS, make_algorithm, make_topology
from examples import defined
from quadratics import LEARNING_RATE, MOMENTUM, NUM_VALUES, Array, Problem, Sgd, constant
from ranks import run_ranks
from sharded_models import Quadratic, polar_factor
from torch import nn

import gossip
from gossip import GossipDataParallel, VirtualWorkers

WORLD_SIZE, NUM_STEPS = 5, 9
PROBLEM = Problem(WORLD_SIZE, NUM_STEPS)
NAMES = [name for name, row in ROWS.items() if row.momentum == MOMENTUM]
IN_PROCESSES = ("diloco", "diloco(awc)", "gradient_tracking", "momentum_exchange")


class DenseMuon(Sgd):
    """The first four values of each rank are a matrix, whose averaged gradient is replaced by its polar factor."""

    def __call__(self, gradients: Array, updated: Array, step: int) -> Array:
        del updated
        is_matrix = np.arange(NUM_VALUES) < 4
        self.velocity = self.momentum * self.velocity + np.where(is_matrix, 1 - self.momentum, 1) * gradients
        ahead = (1 - self.momentum) * gradients + self.momentum * self.velocity
        left, _, right = np.linalg.svd(ahead[:, :4].reshape(-1, 2, 2))
        polar = np.pad((left @ right).reshape(-1, 4), ((0, 0), (0, NUM_VALUES - 4)))
        return -self.rates(step) * np.where(is_matrix, polar, self.velocity)


def make_module() -> Quadratic:
    module = Quadratic(PROBLEM.start)
    module.first = nn.Parameter(module.first.detach().view(2, 2))
    return module


def muon_and_sgd(named: list[tuple[str, nn.Parameter]]) -> tuple[torch.optim.Optimizer, ...]:
    (_, matrix), (_, rest) = named
    muon = torch.optim.Muon([matrix], lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=0.0)
    return muon, torch.optim.SGD([rest], lr=LEARNING_RATE, momentum=MOMENTUM)


def dense(name: str) -> Array:
    topology = make_topology(ROWS[name].topologies[0], WORLD_SIZE)
    return ROWS[name].dense(PROBLEM, topology, DenseMuon(constant, MOMENTUM), None)


def values_of(module: nn.Module, first: int) -> Array:
    return np.concatenate([values.detach().flatten(first).numpy() for values in module.parameters()], axis=-1)


@pytest.fixture(autouse=True)
def exact_polar_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", polar_factor)


@pytest.mark.parametrize("name", NAMES)
def test_virtual_workers_make_the_dense_recursion(name: str) -> None:
    topology = make_topology(ROWS[name].topologies[0], WORLD_SIZE)
    workers = VirtualWorkers(
        make_module(),
        WORLD_SIZE,
        muon_and_sgd,
        topology,
        algorithm=make_algorithm(name),
        loss_reduction="sum",
        bucket_cap_mb=1e-5,
    )
    for step in range(NUM_STEPS):
        if workers.algorithm.weighted:
            workers.weigh(PROBLEM.samples(step))
        workers(torch.tensor(PROBLEM.matrices), torch.tensor(PROBLEM.targets)).sum().backward()
    np.testing.assert_allclose(values_of(workers, 1), dense(name), rtol=0, atol=1e-11)


def test_factory_of_the_page_takes_hidden_matrices_and_is_resumed(tmp_path: Path) -> None:
    factory = defined("docs/algorithms.md", 0, torch=torch)["muon_and_adamw"]
    layers = {"embedding": nn.Embedding(5, 4), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 2)}

    def trained(num_steps: int, folder: Path | None = None) -> VirtualWorkers:
        workers = VirtualWorkers(nn.Sequential(OrderedDict(copy.deepcopy(layers))), 3, factory)
        if folder is not None:
            gossip.load(workers, folder)
        for _ in range(num_steps):
            workers(torch.arange(9) % 5).square().mean().backward()
        return workers

    workers = trained(2)
    muon, adamw = workers.optimizer
    assert [stack.shape for stack in muon.param_groups[0]["params"]] == [(3, 4, 4)]
    assert len(adamw.param_groups[0]["params"]) == 4
    gossip.save(workers, tmp_path)
    for stack, wanted in zip(trained(2, tmp_path).parameters(), trained(4).parameters(), strict=True):
        assert torch.equal(stack, wanted)


def train() -> dict[str, Array]:
    torch.optim._muon._zeropower_via_newtonschulz = polar_factor
    found = {}
    for name in IN_PROCESSES:
        topology = make_topology(ROWS[name].topologies[0], WORLD_SIZE)
        with GossipDataParallel(
            make_module(), muon_and_sgd, topology, algorithm=make_algorithm(name), bucket_cap_mb=1e-5
        ) as model:
            matrix, target = torch.tensor(PROBLEM.matrices[model.rank]), torch.tensor(PROBLEM.targets[model.rank])
            for _ in range(NUM_STEPS):
                model(matrix, target).backward()
            model._engine.settle()
            found[name] = values_of(model.module, 0)
    return found


@pytest.mark.slow
def test_processes_make_the_dense_recursion() -> None:
    ranks = run_ranks(train, world_size=WORLD_SIZE)
    for name in IN_PROCESSES:
        np.testing.assert_allclose([found[name] for found in ranks], dense(name), rtol=0, atol=1e-11)

"""A run begins virtually and goes on as processes, and the other way, as if it had been one of them all the time."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointing import log_of
from ranks import run_ranks
from separate import SGD, TINY_BUCKETS
from torch import nn

import gossip
from gossip import GossipDataParallel, VirtualWorkers

WORLD_SIZE = 5
SAVED_AT, NUM_STEPS = 3, 6
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


@dataclass(frozen=True)
class Case:
    """A run.

    ``unfreezes`` is the step from which all parameters are trained; with ``accumulates`` one gradient is accumulated
    when it is saved.
    """

    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] = SGD
    unfreezes: int | None = None
    accumulates: bool = False
    tolerance: float = 1e-11

    @property
    def arguments(self) -> dict[str, Any]:
        return {"topology": "ring", "bucket_cap_mb": TINY_BUCKETS, "optimizer": self.optimizer} | self.options


CASES = {
    "idle ranks": Case({"topology": "random_matching"}),
    "adapt then combine": Case({"topology": "one_peer_exponential", "algorithm": "atc"}, ADAMW),
    "buffers": Case({"buffers": "average", "compression": "bf16"}, tolerance=1e-2),
    "int4": Case({"compression": "int4", "topology": "base"}),
    "choco": Case({"compression": "choco"}),
    "powergossip": Case({"compression": "powergossip"}, tolerance=1e-9),
    "clipped": Case({"clip_grad_norm": 0.1}),
    "unfrozen": Case(unfreezes=1),
    "accumulated": Case(accumulates=True),
    "two optimizers": Case({"algorithm": "gradient_tracking"}, lambda named: (SGD(named[:2]), ADAMW(named[2:]))),
}


def make_module(case: Case) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    module[3].bias.requires_grad_(case.unfreezes is None)  # type: ignore[union-attr]
    return module


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def train(model: Any, case: Case, ranks: range, steps: range, *, accumulated: bool = False) -> None:
    """Steps of some ranks; where the run accumulates, the step that is saved in has two backward passes."""
    for step in steps:
        if case.unfreezes is not None and step >= case.unfreezes:
            for _, parameter in model.named_parameters():
                parameter.requires_grad_(True)
        if case.accumulates and step == SAVED_AT and not accumulated:
            accumulate(model, ranks)
        backward(model, ranks, step)


def accumulate(model: Any, ranks: range) -> None:
    with model.no_sync():
        backward(model, ranks, 1000)


def backward(model: Any, ranks: range, step: int) -> None:
    model(torch.cat([batch(rank, step) for rank in ranks])).square().mean().backward()


def begin(model: Any, case: Case, ranks: range, folder: Path) -> None:
    """Train, and save in mid-run."""
    train(model, case, ranks, range(SAVED_AT))
    if case.accumulates:
        accumulate(model, ranks)
    gossip.save(model, folder)


def go_on(model: Any, case: Case, ranks: range, folder: Path) -> None:
    """Load what was saved, and train to the end."""
    gossip.load(model, folder)
    train(model, case, ranks, range(SAVED_AT, NUM_STEPS), accumulated=True)


def virtual(case: Case) -> VirtualWorkers:
    return VirtualWorkers(make_module(case), WORLD_SIZE, devices=["cpu"], **case.arguments)


def train_processes(folder: str) -> dict[str, tuple[dict[str, np.ndarray], list[str]]]:
    """By case: this rank's parameters after a run that had begun virtually, and its warnings; and half a run, saved."""
    found = {}
    for name, case in CASES.items():
        with GossipDataParallel(make_module(case), **case.arguments) as model:
            own = range(model.rank, model.rank + 1)
            with log_of() as lines:
                go_on(model, case, own, Path(folder, "virtual", name))
            found[name] = {key: value.numpy().copy() for key, value in model.state_dict().items()}, lines
        with GossipDataParallel(make_module(case), **case.arguments) as model:
            begin(model, case, own, Path(folder, "processes", name))
    return found


@pytest.fixture(scope="module")
def of_processes(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, tuple[dict[str, np.ndarray], list[str]]]]]:
    folder = tmp_path_factory.mktemp("runs")
    for name, case in CASES.items():
        begin(virtual(case), case, range(WORLD_SIZE), folder / "virtual" / name)
    return folder, run_ranks(train_processes, str(folder), world_size=WORLD_SIZE)


@functools.cache
def uninterrupted(name: str) -> dict[str, np.ndarray]:
    """Of virtual workers, [n, *shape]; that processes train alike is another test's matter."""
    workers = virtual(CASES[name])
    train(workers, CASES[name], range(WORLD_SIZE), range(NUM_STEPS))
    return {key: stack.detach().numpy() for key, stack in workers.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_run_that_began_virtually_goes_on_as_processes(name: str, of_processes: Any) -> None:
    for rank, found in enumerate(of_processes[1]):
        parameters, lines = found[name]
        for key, values in uninterrupted(name).items():
            np.testing.assert_allclose(parameters[key], values[rank], rtol=0, atol=CASES[name].tolerance, err_msg=key)
        assert ["5 ranks were trained in 1 process and are now in 5" in line for line in lines] == [True] * (rank == 0)
        assert not any("in flight" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_run_that_began_as_processes_goes_on_virtually(name: str, of_processes: Any) -> None:
    workers = virtual(CASES[name])
    numbers = torch.manual_seed(1).get_state()
    with log_of() as lines:
        go_on(workers, CASES[name], range(WORLD_SIZE), of_processes[0] / "processes" / name)
    assert torch.equal(torch.get_rng_state(), numbers), "those of one of several processes were taken over"
    for key, stack in workers.named_parameters():
        wanted = uninterrupted(name)[key]
        np.testing.assert_allclose(stack.detach().numpy(), wanted, rtol=0, atol=CASES[name].tolerance, err_msg=key)
    assert ["5 ranks were trained in 5 processes and are now in 1" in line for line in lines] == [True]
    assert not any("in flight" in line for line in lines)

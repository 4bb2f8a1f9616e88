"""Ranks that are killed and join again, in loops that are written for Accelerate and Fabric."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.fabric
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from elastic_ranks import steps_until
from ranks import on_ranks
from small_runs import SGD
from torch import nn

from gossip import GossipDataParallel, launch
from gossip.communication import training_store
from gossip.integrations.accelerate import prepare
from gossip.integrations.lightning import GossipFabricStrategy, replica

OPTIONS = {"topology": "ring", "on_peer_loss": "continue"}
NUM_MORE = 8


def with_accelerate(module: nn.Module) -> tuple[GossipDataParallel, nn.Module, Any]:
    """The model, what is called, and its backward function."""
    accelerator = Accelerator(cpu=True)
    model, _ = prepare(accelerator, module, SGD, **OPTIONS)
    return model, model, accelerator.backward


def with_fabric(module: nn.Module) -> tuple[GossipDataParallel, nn.Module, Any]:
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=3, strategy=GossipFabricStrategy(**OPTIONS))
    fabric.launch()
    model, _ = fabric.setup(module, SGD(module.parameters()))
    return replica(model), model, fabric.backward


LIBRARIES = {"accelerate": with_accelerate, "fabric": with_fabric}


def train(library: str, once: str) -> tuple[int, dict[int, float]]:
    """The step at which this rank began, and its rates by step, until a rank has come back and some steps more."""
    torch.manual_seed(0)
    model, module, backward = LIBRARIES[library](nn.Linear(4, 1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, gamma=0.99)
    model.keep(scheduler=scheduler)
    first, rates = model.step, {}
    for _ in steps_until(model, lambda: 3 in model.members, NUM_MORE):
        if model.rank == 1 and model.step == 5 and not Path(once).exists():
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rates[model.step] = model.optimizer.param_groups[0]["lr"]
        backward(module(torch.ones(2, 4)).square().mean())
        scheduler.step()
    model.global_avg()
    model.close()
    return first, rates


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_that_joins_has_the_rates_of_the_others(library: str, tmp_path: Path) -> None:
    found = launch(train, library, str(tmp_path / "once"), world_size=3, on_peer_loss="continue", restart=1)
    (_, others), (_, also), (first, rates) = sorted(found, key=lambda of_rank: of_rank[0])
    assert others == also
    assert first > 5
    assert rates == {step: rate for step, rate in others.items() if step >= first}
    assert len(rates) >= NUM_MORE


@on_ranks(1, anew=True)
def test_what_the_accelerator_divides_among_ranks_is_refused_in_one_that_joins() -> None:
    optimizer = SGD((module := nn.Linear(4, 1)).parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    with (
        mock.patch.object(training_store, "_store", dist.HashStore()),
        pytest.raises(ValueError, match=r"ExponentialLR, but this process joins.*model\.keep\("),
    ):
        prepare(Accelerator(cpu=True), module, optimizer, scheduler)

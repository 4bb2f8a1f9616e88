"""What a model keeps is in its checkpoints, whoever saved them, and however."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import assert_same, everything, log_of, make_model, one_step
from kept import SCHEDULERS, Ema, advance
from replicas import SGD
from torch import nn

import gossip
from gossip import CheckpointError, VirtualWorkers


def start(name: str, *, keeps: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A model, all objects, and those that a call must be told."""
    model = make_model(optimizer=SGD)
    objects = {"scheduler": SCHEDULERS[name](model.optimizer), "ema": Ema(model.module)}
    if keeps:
        model.keep(**objects)
    return model, objects, {} if keeps else objects


def train(model: Any, objects: dict[str, Any], num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(model.optimizer.param_groups[0]["lr"])
        one_step(model)
        objects["ema"].update(model.module)
        advance(objects["scheduler"])
    return rates


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [*((name, True, True) for name in SCHEDULERS), ("cosine", False, True), ("cosine", True, False)],
)
def test_a_run_resumes_whether_objects_were_kept_or_passed(
    name: str, saved: bool, loaded: bool, tmp_path: Path
) -> None:
    model, objects, told = start(name, keeps=saved)
    train(model, objects, 5)
    gossip.save(model, tmp_path, **told)
    rates = train(model, objects, 10)
    model, others, told = start(name, keeps=loaded)
    with log_of() as lines:
        gossip.load(model, tmp_path, **told)
    assert lines == []
    assert train(model, others, 10) == rates
    assert len(set(rates)) > 1
    assert others["ema"].num_updates == objects["ema"].num_updates == 15
    assert_same(others["ema"].values, objects["ema"].values)


def test_names_that_stand_for_two_things_are_refused(tmp_path: Path) -> None:
    model, objects, _ = start("cosine", keeps=True)
    for function in (gossip.save, gossip.load):
        with pytest.raises(
            ValueError, match=r"^ema was passed, but the model .*model\.keep\(ema=\.\.\.\).*leave it out"
        ):
            function(model, tmp_path, ema=objects["ema"])
    assert list(tmp_path.iterdir()) == []
    gossip.save(model, tmp_path, position=3)
    assert gossip.load(model, tmp_path).data == {"position": 3}


def test_an_object_that_the_checkpoint_does_not_hold_is_kept_afterwards(tmp_path: Path) -> None:
    model = make_model()
    one_step(model)
    gossip.save(model, tmp_path)
    before = everything(model)
    model.keep(ema=Ema(model.module))
    with pytest.raises(CheckpointError, match=r"no state for 'ema', only for no part.*model\.keep\(ema=\.\.\.\) after"):
        gossip.load(model, tmp_path)
    assert_same(everything(model), before)


def test_virtual_workers_keep_objects_as_well(tmp_path: Path) -> None:
    states = []
    for is_first in (True, False):
        workers = VirtualWorkers(nn.Linear(4, 2), 2, SGD, devices=["cpu"])
        scheduler = SCHEDULERS["exponential"](workers.optimizer)
        workers.keep(scheduler=scheduler)
        if is_first:
            for _ in range(3):
                workers(torch.ones(2, 4)).sum().backward()
                scheduler.step()
            gossip.save(workers, tmp_path)
        gossip.load(workers, tmp_path)
        states.append([scheduler.state_dict(), workers.optimizer.param_groups[0]["lr"]])
    assert states[0] == states[1]

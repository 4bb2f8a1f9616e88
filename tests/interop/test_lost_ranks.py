"""Loops of other libraries in which a rank is killed, and may join again, or all are preempted."""

import itertools
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from elastic_ranks import steps_until
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from ranks import on_ranks
from small_runs import SGD
from tiers import rest_is_slow
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

from gossip import GossipDataParallel, GossipError, launch
from gossip.communication import training_store
from gossip.integrations.accelerate import prepare
from gossip.integrations.lightning import GossipFabricStrategy, GossipStrategy, replica
from gossip.integrations.transformers import GossipTrainer

WORLD_SIZE, NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 4, 96, 4, 3
STEPS = NUM_EPOCHS * NUM_SAMPLES // WORLD_SIZE // BATCH_SIZE
AT = STEPS // NUM_EPOCHS + 2  # in the second epoch
OPTIONS = {"topology": "ring", "on_peer_loss": "continue"}

Found = tuple[int, int, int, int, float]
"""Of a rank that remains: its number, how many remain, its steps, and the last evaluation's samples and loss."""


class Net(nn.Module):
    """A linear model; one rank does something to itself before a batch of training, or the first of an evaluation."""

    def __init__(self, place: str, ranks: tuple[int, ...], number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.place, self.signal = place, number
        self.is_struck = int(os.environ["RANK"]) in ranks
        self.num_batches = self.num_evaluated = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.num_batches += self.training
        at = self.num_batches == AT if self.training else self.num_batches > AT
        if self.is_struck and at and self.training == (self.place == "training"):
            self.is_struck = False
            os.kill(os.getpid(), self.signal)
        y = self.layer(x)
        return y if labels is None else {"loss": mse_loss(y, labels), "logits": y}


def samples() -> TensorDataset:
    x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def batches(*, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(samples(), BATCH_SIZE, shuffle=shuffle)


class Module(pl.LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("validated", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
        self.log("num", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)}


def with_lightning(net: Net, folder: str, resumes: bool) -> Found:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=GossipStrategy(**OPTIONS),
        max_epochs=NUM_EPOCHS,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, monitor="validated", save_last=True), EarlyStopping("validated")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(net)
    trainer.fit(module, batches(shuffle=True), batches(), ckpt_path="hpc" if resumes else None)
    assert trainer.callback_metrics["num"] == NUM_SAMPLES  # the last validation is of all of them
    (found,) = trainer.test(module, batches(), verbose=False)
    assert Path(folder, "last.ckpt.gossip").is_dir()
    return trainer.global_rank, trainer.world_size, trainer.global_step, int(found["num"]), found["validated"]


def with_fabric(net: Net, folder: str, _: bool) -> Found:
    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=GossipFabricStrategy(**OPTIONS))
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.02))
    loader = fabric.setup_dataloaders(batches(shuffle=True))
    for _epoch in range(NUM_EPOCHS):
        for inputs, targets in loader:
            fabric.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        evaluated = fabric.setup_dataloaders(batches())
        with replica(model).averaged(), torch.no_grad():
            net.eval()
            errors = torch.cat([(model(inputs) - targets).square() for inputs, targets in evaluated])
            num = fabric.all_reduce(torch.tensor(float(len(errors))), reduce_op="sum")
            total = fabric.all_reduce(errors.sum(), reduce_op="sum")
            net.train()
        fabric.save(f"{folder}/state.ckpt", {"model": model, "optimizer": optimizer})
        fabric.barrier()
    num_steps = replica(model).step
    replica(model).global_avg()
    replica(model).close()
    assert len(fabric.all_gather(torch.tensor(fabric.global_rank))) == fabric.world_size
    return fabric.global_rank, fabric.world_size, num_steps, int(num), float(total / num)


def with_accelerate(net: Net, folder: str, _: bool) -> Found:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    model, optimizer, loader = prepare(accelerator, net, optimizer, batches(shuffle=True), **OPTIONS)
    for _epoch in range(NUM_EPOCHS):
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        evaluated = accelerator.prepare(batches())
        with model.averaged(), torch.no_grad():
            model.eval()
            every = [
                accelerator.gather_for_metrics((model(inputs) - targets).square()) for inputs, targets in evaluated
            ]
            errors = torch.cat(every)
            model.train()
        accelerator.save_state(f"{folder}/state")
    num_steps = model.step
    model.global_avg()
    model.close()
    assert len(accelerator.gather_for_metrics([0], use_gather_object=True)) == accelerator.num_processes
    return accelerator.process_index, accelerator.num_processes, num_steps, len(errors), float(errors.mean())


def with_trainer(net: Net, folder: str, resumes: bool) -> Found:
    data = [{"x": x, "labels": y} for x, y in samples()]
    args = TrainingArguments(
        folder,
        num_train_epochs=NUM_EPOCHS,
        learning_rate=0.05,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
    )
    trainer = GossipTrainer(
        net,
        args,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda predicted: {"num": len(predicted.label_ids)},
        gossip=OPTIONS,
    )
    trainer.train(resume_from_checkpoint=resumes or None)
    num_steps = trainer.state.global_step
    found = trainer.evaluate()
    trainer.save_model(f"{folder}/trained")
    if args.world_size < WORLD_SIZE:
        with pytest.raises(GossipError, match=r"of 4 these are lost: \d; start all of them again"):
            trainer.train()
    return args.process_index, args.world_size, num_steps, found["eval_num"], found["eval_loss"]


LIBRARIES: dict[str, Callable[[Net, str, bool], Found]] = {
    "lightning": with_lightning,
    "transformers": with_trainer,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}


def train(library: str, folder: str, place: str, ranks: tuple[int, ...], number: int, resumes: bool = False) -> Found:
    warnings.filterwarnings("ignore")  # the libraries' own
    return LIBRARIES[library](Net(place, ranks, number), folder, resumes)


@pytest.mark.parametrize(
    ("library", "place", "rank"),
    rest_is_slow(
        [*itertools.product(LIBRARIES, ["training"], [2]), *itertools.product(LIBRARIES, ["evaluation"], [0])], 2
    ),
)
def test_the_others_train_evaluate_and_save_to_the_end(tmp_path: Path, library: str, place: str, rank: int) -> None:
    found = launch(
        train, library, str(tmp_path), place, (rank,), signal.SIGKILL, world_size=WORLD_SIZE, on_peer_loss="continue"
    )
    assert found.pop(rank) is None
    assert [number for number, *_ in found] == [0, 1, 2]
    loss = found[0][-1]
    assert {tuple(rest) for _, *rest in found} == {(3, STEPS, NUM_SAMPLES, loss)}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["training", "evaluation"])
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_all_save_and_end_together_and_go_on_when_started_again(tmp_path: Path, library: str, place: str) -> None:
    calls = {"world_size": WORLD_SIZE, "on_peer_loss": "continue"}
    every = tuple(range(WORLD_SIZE))
    with pytest.raises(SystemExit, match="143"):
        launch(train, library, str(tmp_path / "run"), place, every, signal.SIGTERM, **calls)
    found = launch(train, library, str(tmp_path / "run"), place, (), signal.SIGTERM, True, **calls)
    loss = found[0][-1]
    assert {tuple(rest) for _, *rest in found} == {(WORLD_SIZE, STEPS, NUM_SAMPLES, loss)}


NUM_MORE = 8


def loop_of_accelerate(module: nn.Module) -> tuple[GossipDataParallel, nn.Module, Any]:
    """The model, what is called, and its backward function."""
    accelerator = Accelerator(cpu=True)
    model, _ = prepare(accelerator, module, SGD, **OPTIONS)
    return model, model, accelerator.backward


def loop_of_fabric(module: nn.Module) -> tuple[GossipDataParallel, nn.Module, Any]:
    fabric = Fabric(accelerator="cpu", devices=3, strategy=GossipFabricStrategy(**OPTIONS))
    fabric.launch()
    model, _ = fabric.setup(module, SGD(module.parameters()))
    return replica(model), model, fabric.backward


LOOPS = {"accelerate": loop_of_accelerate, "fabric": loop_of_fabric}


def train_until_one_joins(library: str, once: str) -> tuple[int, dict[int, float]]:
    """The step at which this rank began, and its rates by step, until a rank has come back and some steps more."""
    torch.manual_seed(0)
    model, module, backward = LOOPS[library](nn.Linear(4, 1))
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


@pytest.mark.parametrize("library", LOOPS)
def test_one_that_joins_has_the_rates_of_the_others(library: str, tmp_path: Path) -> None:
    found = launch(
        train_until_one_joins, library, str(tmp_path / "once"), world_size=3, on_peer_loss="continue", restart=1
    )
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

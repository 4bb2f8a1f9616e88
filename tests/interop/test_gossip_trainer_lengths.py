"""GossipTrainer on ranks of different numbers of batches, and what Trainers tell of their samples."""

import collections
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning_modules import BATCH_SIZE, Net, batches, trainer_of
from ranks import on_ranks
from replicas import flat
from tiny_gpt2 import Tokens, batch_of, make_module, make_trainer, sample
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, get_linear_schedule_with_warmup

import gossip
from gossip import GossipDataParallel
from gossip.integrations.lightning import GossipStrategy
from gossip.integrations.trainer_epochs import UnevenEpoch
from gossip.integrations.transformers import GossipTrainer

LR, NUM_STEPS = 0.05, 10


def num_batches() -> int:
    """Of this rank in an epoch: 3 and 5."""
    return 3 + 2 * dist.get_rank()


def first_sample() -> int:
    return 100 * dist.get_rank()


class Stream(IterableDataset):
    """Of some samples of this rank's own, once, and at most 8 in an epoch."""

    def __init__(self, length: int) -> None:
        self._indices = iter(range(first_sample(), first_sample() + length))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(sample, itertools.islice(self._indices, 8))


class OwnData(GossipTrainer):
    """Each rank's own samples, which accelerate does not divide."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=2)


class Shuffled(OwnData):
    """In another order in every epoch."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=2, shuffle=True)


def by_hand(options: dict[str, Any]) -> tuple[torch.Tensor, list[float]]:
    module = make_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0, fused=True)
    losses = []
    with GossipDataParallel(module, optimizer, **options) as model:
        scheduler = get_linear_schedule_with_warmup(model.optimizer, 0, NUM_STEPS)
        for _ in range(2):
            total = torch.zeros(())
            with model.join():
                for number in range(num_batches()):
                    first = first_sample() + 2 * number
                    batch = batch_of(range(first, first + 2))
                    num_items = (batch["labels"] != -100).sum()
                    loss = model(**batch, num_items_in_batch=num_items).loss
                    loss.backward()
                    total += loss.detach()
                    model.optimizer.step()
                    model.zero_grad()
                    scheduler.step()
            for _ in range(5 - num_batches()):
                scheduler.step()
            means = [torch.empty(()) for _ in range(2)]
            dist.all_gather(means, total / num_batches())
            losses.append(float(sum(means)) / 2)
        model.global_avg()
        return flat(module), losses


def train(folder: Path, options: dict[str, Any]) -> None:
    expected, losses = by_hand(options)
    data = Tokens(2 * num_batches(), first_sample())
    given = {"learning_rate": LR, "max_grad_norm": 0.0, "train_dataset": data, "gossip": options}
    saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch"}
    with pytest.raises(ValueError, match=r"different numbers of batches in an epoch, 3, 5.*join=True"):
        make_trainer(folder, make_module(), TrainerCallback(), OwnData, **given).train()

    trainer = make_trainer(folder, make_module(), TrainerCallback(), OwnData, join=True, **given, **saving)
    trainer.train()
    torch.testing.assert_close(flat(trainer.model), expected, rtol=0, atol=0)
    assert trainer.state.global_step == NUM_STEPS
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [(5, pytest.approx(losses[0])), (10, pytest.approx(losses[1]))]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [5, 10]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]

    refused = make_trainer(folder, make_module(), TrainerCallback(), OwnData, join=True, **given)
    refused.args.average_tokens_across_devices = True
    with pytest.raises(ValueError, match=r"average_tokens_across_devices=True with join=True"):
        refused.train()


def resume(folder: Path) -> None:
    """From the end of an epoch, where each rank begins its own batches anew, shuffled as without the interruption."""
    data = Tokens(2 * num_batches(), first_sample())
    given = {"learning_rate": LR, "train_dataset": data, "join": True, "num_train_epochs": 3}
    saving = {"save_strategy": "epoch"}
    whole = make_trainer(folder, make_module(), TrainerCallback(), Shuffled, **given, **saving)
    whole.train()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (10, 15, 5)]
    resumed = make_trainer(folder, make_module(), TrainerCallback(), Shuffled, **given)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    torch.testing.assert_close(flat(resumed.model), flat(whole.model), rtol=0, atol=0)
    assert (resumed.state.global_step, resumed.state.epoch) == (15, 3.0)
    losses = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def do_not_resume_within_an_epoch(folder: Path) -> None:
    """The rank that has written the trainer's state had no more batches, the other one had two."""
    given = {"train_dataset": Tokens(2 * num_batches(), first_sample()), "join": True, "save_strategy": "epoch"}
    stopped = make_trainer(folder, make_module(), TrainerCallback(), OwnData, max_steps=8, **given)
    stopped.train()
    assert (stopped.state.global_step, stopped.state.epoch) == (8, pytest.approx(1.6))
    again = make_trainer(folder, make_module(), TrainerCallback(), OwnData, max_steps=20, **given)
    with pytest.raises(ValueError, match=r"saved after 1.60 epochs.*at the end of an epoch"):
        again.train(resume_from_checkpoint=True)


def train_on_streams(folder: Path) -> None:
    """3 batches and 10, two to a step and four to an epoch: one rank has none from the second epoch on."""
    trainer = make_trainer(
        folder,
        make_module(),
        TrainerCallback(),
        OwnData,
        train_dataset=Stream(6 + 14 * dist.get_rank()),
        max_steps=100,
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="loss",
        eval_strategy="epoch",
        gradient_accumulation_steps=2,
        join=True,
    )
    trainer.train()
    assert trainer.state.global_step == 5


@on_ranks(2, anew=True)
def test_ranks_of_different_lengths_join(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(None):
        train(tmp_path / "whole", {"step_in_backward": False})
        train_on_streams(tmp_path / "streams")
        resume(tmp_path / "resumed")
        do_not_resume_within_an_epoch(tmp_path / "stopped")


@pytest.mark.parametrize(("made", "own", "stops"), [(0, 0, True), (1, 0, False), (1, 1, True), (2, 1, True)])
def test_a_rank_that_wants_to_stop_does_unless_only_others_made_steps(made: int, own: int, stops: bool) -> None:
    state, control = TrainerState(max_steps=100), TrainerControl(should_training_stop=True)
    trainer = mock.MagicMock(state=state, control=control, _tr_loss=torch.zeros(()))
    model: Any = SimpleNamespace(step=0, world=SimpleNamespace(gather_bytes=lambda said, _: [said]))
    epoch = UnevenEpoch(model, trainer, number=0, num_steps=3)
    model.step, state.global_step = made, own
    epoch.end()
    assert control.should_training_stop is stops


WEIGHED = {"algorithm": gossip.PushSum(weighted=True)}


class Spy:
    """Notes what a model is told, with its step."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []
        self._weigh = GossipDataParallel.weigh

    def __call__(self, model: GossipDataParallel, samples: float) -> None:
        self.told.append((model.step, samples))
        self._weigh(model, samples)


class Counting(GossipTrainer):
    """Counts the tokens of each step that have labels."""

    num_tokens: collections.Counter[int]

    def training_step(self, model: GossipDataParallel, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.num_tokens[model.step] += int((inputs["labels"] != -100).sum())
        return super().training_step(model, inputs, num_items_in_batch)


def count_tokens(folder: Path) -> None:
    spy, Counting.num_tokens = Spy(), collections.Counter()
    with mock.patch.object(GossipDataParallel, "weigh", lambda *args: spy(*args)):
        watch = TrainerCallback()
        make_trainer(folder, make_module(), watch, Counting, gossip=WEIGHED, gradient_accumulation_steps=2).train()
    assert dict(spy.told) == Counting.num_tokens
    assert len(spy.told) == 10  # before the first batch of each step: with those of the others


@on_ranks(2, anew=True)
def test_trainers_tell_the_model_of_its_samples(tmp_path: Path) -> None:
    count_tokens(tmp_path)
    spy = Spy()
    with mock.patch.object(GossipDataParallel, "weigh", lambda *args: spy(*args)):
        trainer = trainer_of(GossipStrategy(**WEIGHED), accumulate_grad_batches=3, max_epochs=1)
        trainer.fit(Net(), batches())
    assert spy.told == [(0, BATCH_SIZE), (0, 2 * BATCH_SIZE), (0, 3 * BATCH_SIZE), (1, BATCH_SIZE), (1, 2 * BATCH_SIZE)]

"""GossipTrainer(total_batch_size=...): the samples of each step are held, whoever remains."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from replicas import flat
from tiny_gpt2 import VOCABULARY, Tokens, make_module, make_trainer
from torch import nn
from transformers import TrainerCallback

from gossip import launch

NUM_SAMPLES, TOTAL, NUM_EPOCHS, AT = 48, 12, 3, 6


class Numbers(torch.utils.data.Dataset[Any]):
    """Sample i has the tokens of i in the base of the vocabulary."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([*divmod(index, VOCABULARY), 0, 1])
        return {"input_ids": tokens, "labels": tokens}


def watched(module: nn.Module) -> list[list[int]]:
    """The samples of each of its batches of training, as they come."""
    batches: list[list[int]] = []

    def note(_: nn.Module, __: object, given: dict[str, torch.Tensor]) -> None:
        if module.training:
            batches.append((given["input_ids"][:, 0] * VOCABULARY + given["input_ids"][:, 1]).tolist())
            if len(batches) == AT and os.environ.get("RANK") == "2":
                os.kill(os.getpid(), signal.SIGKILL)

    module.register_forward_pre_hook(note, with_kwargs=True)
    return batches


def train(folder: Path) -> list[list[int]]:
    batches = watched(module := make_module())
    held = {"train_dataset": Numbers(), "total_batch_size": TOTAL, "num_train_epochs": NUM_EPOCHS}
    make_trainer(folder, module, TrainerCallback(), gossip={"on_peer_loss": "continue"}, **held).train()
    return batches


def test_ranks_that_remain_divide_the_samples_of_each_step(tmp_path: Path) -> None:
    found = launch(train, tmp_path, world_size=4, on_peer_loss="continue")
    assert found.pop(2) is None
    steps = [list(itertools.chain(*step)) for step in zip(*found, strict=True)]
    assert len(steps) == NUM_EPOCHS * NUM_SAMPLES // TOTAL
    sizes = [len(step) for step in steps]
    assert sizes[:AT] == [TOTAL * 3 // 4] * AT
    assert sizes[AT + 1 :] == [TOTAL] * (len(sizes) - AT - 1)
    assert sorted(itertools.chain(*steps[-NUM_SAMPLES // TOTAL :])) == list(range(NUM_SAMPLES))


@on_ranks(1, anew=True)
def test_training_that_goes_on_within_an_epoch_has_the_samples_left(tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_dataset": Numbers(), "total_batch_size": TOTAL, "gradient_accumulation_steps": 2}
    whole = watched(module := make_module())
    make_trainer(tmp_path, module, TrainerCallback(), save_strategy="steps", save_steps=3, **given).train()
    assert {len(batch) for batch in whole} == {TOTAL // 2}
    assert whole[:8] != whole[8:]
    rest = watched(resumed := make_module())
    trainer = make_trainer(tmp_path, resumed, TrainerCallback(), **given)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert rest == whole[6:]
    assert torch.equal(flat(resumed), flat(module))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"total_batch_size": 0}, "total_batch_size must be at least 1, got 0"),
        (
            {"total_batch_size": 7, "gradient_accumulation_steps": 2},
            "total_batch_size=7 cannot be held with gradient_a",
        ),
        (
            {"total_batch_size": 8, "dataloader_num_workers": 2},
            "fetched ahead are divided among the ranks of that time",
        ),
        ({"total_batch_size": 8, "join": True}, "total_batch_size=8 cannot be held with join=True"),
    ],
)
def test_what_cannot_be_held_is_refused(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_trainer(tmp_path, make_module(), TrainerCallback(), **given)


def test_dataset_that_is_too_small_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_module(), TrainerCallback(), total_batch_size=8, train_dataset=Tokens(5))
    with pytest.raises(ValueError, match="a batch has 8 samples, but the dataset 5"):
        trainer.train()

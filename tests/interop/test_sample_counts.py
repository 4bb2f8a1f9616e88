"""What Trainers tell a model that counts ranks by their samples: those of all batches of a step, before its update."""

import collections
from pathlib import Path
from typing import Any
from unittest import mock

from lightning_modules import BATCH_SIZE, Net, batches, trainer_of
from ranks import on_ranks
from tiny_gpt2 import make_module, make_trainer
from transformers import TrainerCallback

import gossip
from gossip import GossipDataParallel
from gossip.integrations.lightning import GossipStrategy
from gossip.integrations.transformers import GossipTrainer

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


def train(folder: Path) -> None:
    spy, Counting.num_tokens = Spy(), collections.Counter()
    with mock.patch.object(GossipDataParallel, "weigh", lambda *args: spy(*args)):
        watch = TrainerCallback()
        make_trainer(folder, make_module(), watch, Counting, gossip=WEIGHED, gradient_accumulation_steps=2).train()
    assert dict(spy.told) == Counting.num_tokens
    assert len(spy.told) == 10  # before the first batch of each step: with those of the others


@on_ranks(2, anew=True)
def test_trainers_tell_the_model_of_its_samples(tmp_path: Path) -> None:
    train(tmp_path)
    spy = Spy()
    with mock.patch.object(GossipDataParallel, "weigh", lambda *args: spy(*args)):
        trainer = trainer_of(GossipStrategy(**WEIGHED), accumulate_grad_batches=3, max_epochs=1)
        trainer.fit(Net(), batches())
    assert spy.told == [(0, BATCH_SIZE), (0, 2 * BATCH_SIZE), (0, 3 * BATCH_SIZE), (1, BATCH_SIZE), (1, 2 * BATCH_SIZE)]

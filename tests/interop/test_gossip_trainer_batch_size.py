"""GossipTrainer with auto_find_batch_size: memory does not suffice on one rank, and all start over."""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_gpt2 import Tokens, flat, make_module, make_trainer
from transformers import TrainerCallback

from gossip import ExchangeError, GossipDataParallel, launch
from gossip.integrations.transformers import GossipTrainer

NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
LARGE, FITS = 4, 3


class Fails(torch.autograd.Function):
    """Memory does not suffice for the backward pass."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(*_: Any) -> torch.Tensor:
        raise RuntimeError(NO_MEMORY)


class Short(GossipTrainer):
    """On the ranks ``short`` a batch of more than FITS samples fails from a step on, forward or backward."""

    short: tuple[int, ...] = ()
    from_step, in_backward = 0, False
    fits, error = FITS, RuntimeError(NO_MEMORY)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        is_large = model.training and len(inputs["input_ids"]) > self.fits
        if not is_large or dist.get_rank() not in self.short or self.state.global_step < self.from_step:
            return loss
        if self.in_backward:
            return Fails.apply(loss)
        raise self.error


class Watch(TrainerCallback):
    trainer: Any = None


def train(folder: Path, batch_size: int, *, searches: bool, given: dict[str, Any], **how: Any) -> Any:
    """A trainer that has trained, with dropout and an optimizer of the user's that has a state of its own."""
    module = make_module(dropout=0.1)
    trainer = make_trainer(
        folder,
        module,
        Watch(),
        Short,
        per_device_train_batch_size=batch_size,
        auto_find_batch_size=searches,
        **{"gossip": {"timeout": timedelta(seconds=20)}, **given},
    )
    if how.pop("own_optimizer", False):
        trainer.optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    vars(trainer).update(how)
    trainer.train()
    return trainer


def same(folder: Path) -> None:
    """What comes out is what a training with the smaller batches from the beginning on gives, bit for bit."""
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = {"gossip": {"step_in_backward": False, "timeout": timedelta(seconds=20)}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"short": (1,), "from_step": 2, "in_backward": True}, {"logging_steps": 3}),
        ({"short": (0,), "from_step": 3, "own_optimizer": True}, plain | saving),
        ({"short": ()}, {}),
    ]
    for number, (how, given) in enumerate(cases):
        sufficient = {name: value for name, value in how.items() if name == "own_optimizer"}
        size = FITS if how["short"] else LARGE
        searched = train(folder / f"{number}", LARGE, searches=True, given=given, **how)
        expected = train(folder / f"{number}_expected", size, searches=False, given=given, **sufficient)
        torch.testing.assert_close(flat(searched.model), flat(expected.model), rtol=0, atol=0)
        assert (searched._train_batch_size, searched.state.train_batch_size) == (size, size)
        assert searched.state.global_step == expected.state.global_step
        histories = [
            [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
            for trainer in (searched, expected)
        ]
        assert histories[0] == histories[1]
        assert type(searched.model_wrapped) is not GossipDataParallel


def of_different_lengths(folder: Path) -> None:
    """With ``join=True`` the others may have left the data before a rank runs out of memory."""
    given = {"train_dataset": Tokens(12 + 12 * dist.get_rank()), "join": True}

    class OwnData(Short):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=self._train_batch_size)

    trainers = []
    for size, searches in ((LARGE, True), (FITS, False)):
        trainer = make_trainer(
            folder, make_module(), Watch(), OwnData, per_device_train_batch_size=size, auto_find_batch_size=searches,
            gossip={"timeout": timedelta(seconds=20)}, **given,
        )  # fmt: skip
        if searches:
            vars(trainer).update(short=(1,), from_step=5)
        trainer.train()
        trainers.append(trainer)
    torch.testing.assert_close(flat(trainers[0].model), flat(trainers[1].model), rtol=0, atol=0)
    assert trainers[0].state.global_step == trainers[1].state.global_step == 16


def refusals(folder: Path) -> None:
    with pytest.raises(ValueError, match="include_num_input_tokens_seen='all' with auto_find_batch_size=True"):
        train(folder, LARGE, searches=True, given={"include_num_input_tokens_seen": "all"})


def nothing_fits(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        train(folder, 2, searches=True, given={}, short=(1,), fits=0)


def other_errors_are_not_taken_for_a_lack_of_memory(folder: Path) -> None:
    with pytest.raises((ZeroDivisionError, ExchangeError)) as caught:
        train(
            folder, LARGE, searches=True, given={"gossip": {"timeout": timedelta(seconds=3)}},
            short=(1,), from_step=1, error=ZeroDivisionError("of the user's"),
        )  # fmt: skip
    assert (caught.type is ZeroDivisionError) == (dist.get_rank() == 1)


def quiet(function: Any, folder: Path) -> None:
    with contextlib.redirect_stdout(None):
        function(folder)


@pytest.mark.parametrize(
    "function", [same, of_different_lengths, refusals, nothing_fits, other_errors_are_not_taken_for_a_lack_of_memory]
)
def test_batch_size_search(function: Any, tmp_path: Path) -> None:
    launch(functools.partial(quiet, function), tmp_path, world_size=2)

"""Epochs of a Trainer in which ranks have different numbers of batches, or divide global batches that are held."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler
from transformers.optimization import GreedyLR
from transformers.trainer_callback import TrainerControl

from gossip import GossipDataParallel

_STEPPED_BY_METRICS = (ReduceLROnPlateau, GreedyLR)
_DUE = ("should_log", "should_evaluate", "should_save")


class UnevenEpoch:
    """Work that is deferred until all ranks have ended an epoch in which each made its own number of steps.

    ``number`` epochs are complete before this one, and this rank's batches suffice for ``num_steps`` optimizer steps.
    """

    def __init__(self, model: GossipDataParallel, trainer: Any, number: int, num_steps: int) -> None:
        self._model, self._trainer = model, trainer
        self._number, self._num_steps = number, num_steps
        self._first, self._first_global = model.step, trainer.state.global_step
        self._loss = trainer._tr_loss.clone()
        self._due = dict.fromkeys(_DUE, False)
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def put_off(self, control: TrainerControl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what is due after a step, and the arguments that it was to be called with. Local."""
        for name in _DUE:
            self._due[name] |= getattr(control, name)
        self._arguments = args, kwargs

    def end(self) -> None:
        """Count the steps that others made as well, then do what is due on any rank. Collective."""
        trainer, made = self._trainer, self._model.step - self._first
        own = trainer.state.global_step - self._first_global
        if not isinstance(trainer.lr_scheduler, _STEPPED_BY_METRICS):
            for _ in range(made - own):
                trainer.lr_scheduler.step()
        trainer.state.global_step += made - own
        if own:  # scaled to the number of steps that are counted
            trainer._tr_loss.sub_(self._loss).mul_(made / own).add_(self._loss)
        # It is an int where there was no batch, which would be gathered as different bytes.
        trainer.current_flos = float(trainer.current_flos)
        self._agree(made, own)
        args, kwargs = self._arguments
        trainer._maybe_log_save_evaluate(*args, **kwargs)

    def _agree(self, made: int, own: int) -> None:
        """Agree with the other ranks: a rank without batches wants to stop, but all continue while one has some.

        The epoch is complete, and training can be resumed after it, unless a rank stopped before its last batch.
        """
        trainer, control = self._trainer, self._trainer.control
        stops = control.should_training_stop and (own > 0 or made == 0)
        share = own / self._num_steps if control.should_training_stop and own > 0 else 1.0
        stops_for_all = stops or trainer.state.global_step >= trainer.state.max_steps
        said = json.dumps(self._due | {"stops": stops_for_all, "share": min(share, 1.0)})
        answers = self._model.world.gather_bytes(said.encode(), "agreeing on what is due at the end of an epoch")
        due = [json.loads(answer) for answer in answers]
        for name in _DUE:
            setattr(control, name, any(each[name] for each in due))
        control.should_training_stop = any(each["stops"] for each in due)
        trainer.state.epoch = self._number + min(each["share"] for each in due)


class HeldBatches(Sampler[list[int]]):
    """The shares of one rank in the batches of all ranks together, in a random order that is the same on all.

    ``place()`` returns the number of this rank among those that train, and how many they are, when a batch is due. The
    samples at the end of an epoch that do not fill a batch are left out; they differ from epoch to epoch.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, place: Callable[[], tuple[int, int]]) -> None:
        if num_samples < batch_size:
            raise ValueError(
                f"total_batch_size: a batch has {batch_size} samples, but the dataset {num_samples}; pass less"
            )
        self._num_samples, self._batch_size, self._seed, self._place = num_samples, batch_size, seed, place
        self.epoch = 0

    def __len__(self) -> int:
        return self._num_samples // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        for number in range(len(self)):
            rank, num_ranks = self._place()
            batch = order[number * self._batch_size : (number + 1) * self._batch_size]
            yield batch.tensor_split(num_ranks)[rank].tolist()


class HeldLoader(DataLoader[Any]):
    """A data loader of such batches."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass have the order of an epoch. Local."""
        assert isinstance(self.batch_sampler, HeldBatches)
        self.batch_sampler.epoch = epoch

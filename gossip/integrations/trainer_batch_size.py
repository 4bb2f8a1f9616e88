"""The search of a Trainer for a batch size that fits the memory of every rank: ``auto_find_batch_size``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.memory import should_reduce_batch_size
from loguru import logger

from gossip import World
from gossip.checkpoints.random_states import restore_rng_states, rng_states
from gossip.errors import ExchangeError, GossipError

_OUT_OF_MEMORY, _LOST_A_RANK = b"out of memory", b"lost a rank"


class BatchSizeSearch:
    """What a training starts from, and the ranks' agreement to start over with smaller batches.

    A rank that runs out of memory ends communication, so that its peers, which wait for its message, fail as well.
    Then all ranks say why their attempt failed. If it was for want of memory on one of them, each raises an error by
    which the Trainer takes smaller batches: all begin again, from what they began with, with batches of the same size.
    ``timeout`` is how long a rank waits for the others then.
    """

    def __init__(self, trainer: Any, timeout: timedelta) -> None:
        self._trainer, self._timeout = trainer, timeout
        self._weights = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(trainer.model).items()}
        self._random = rng_states()
        self._makes_optimizer = trainer.optimizer is None
        self._states = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts() if part is not None}

    def attempt(self, train: Callable[[], Any], close: Callable[[BaseException], bool]) -> Any:
        """Train; if memory does not suffice on some rank, go back to the beginning, and raise RuntimeError.

        ``close`` ends communication after the error that it is given; False: it had not begun, or has been ended.
        """
        try:
            return train()
        except Exception as error:
            is_short = should_reduce_batch_size(error)
            if not (is_short or isinstance(error, ExchangeError)) or not close(error):
                raise
            short = self._short_ranks(is_short)
            if not short:
                raise
            self._go_back()
            text = f"rank {', '.join(map(str, short))} of {self._trainer.args.world_size} ran out of memory."
            if self._trainer.args.process_index == short[0]:
                logger.warning("{} All ranks start over, with smaller batches", text)
            if is_short:
                raise
        raise RuntimeError(text)

    def _short_ranks(self, is_short: bool) -> list[int]:
        """Return which ranks ran out of memory; none, if a rank does not answer. Collective."""
        try:
            with contextlib.closing(World(self._timeout)) as world:
                reasons = world.gather_bytes(
                    _OUT_OF_MEMORY if is_short else _LOST_A_RANK, "agreeing on a smaller batch size"
                )
        except GossipError:
            return []
        return [rank for rank, reason in enumerate(reasons) if reason == _OUT_OF_MEMORY]

    def _parts(self) -> list[tuple[str, Any]]:
        trainer = self._trainer
        scheduler = None if trainer._created_lr_scheduler else trainer.lr_scheduler  # of an earlier train()
        return [("optimizer", trainer.optimizer), ("scheduler", scheduler), ("scaler", trainer.accelerator.scaler)]

    def _go_back(self) -> None:
        """Give the module, and what the trainer has not made itself, the state of the beginning. Local."""
        trainer = self._trainer
        with torch.no_grad():
            for name, tensor in _tensors(trainer.model).items():
                tensor.copy_(self._weights[name])
                tensor.grad = None
        if isinstance(trainer.optimizer, AcceleratedOptimizer):
            trainer.optimizer = trainer.optimizer.optimizer
        if self._makes_optimizer:
            trainer.optimizer = None
        for name, part in self._parts():
            if name in self._states:
                part.load_state_dict(copy.deepcopy(self._states[name]))
        restore_rng_states(self._random)


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}

"""Optimizers whose parameters in training differ from those to be evaluated."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from gossip.errors import GossipError

_MODE = "train_mode"


def in_train_mode(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the optimizers of the library ``schedulefree``, or similar ones, between ``train()`` and ``eval()``.

    They train at a point y between the average x of the iterates, which is to be evaluated, and the newest iterate z,
    which is part of their state; ``eval()`` moves the parameters from y to x.

    References
    ----------
    Defazio et al., "The Road Less Scheduled", NeurIPS 2024.
    """
    return [
        optimizer
        for optimizer in optimizers
        if callable(getattr(optimizer, "eval", None)) and any(group.get(_MODE) for group in optimizer.param_groups)
    ]


def evaluate(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Move the parameters to where they are evaluated; return a function that notes that they have been restored."""
    moved = [group for optimizer in in_train_mode(optimizers) for group in optimizer.param_groups if group.get(_MODE)]
    for optimizer in in_train_mode(optimizers):
        optimizer.eval()

    def were_put_back() -> None:
        for group in moved:
            group[_MODE] = True

    return were_put_back


def check_evaluated(optimizers: Iterable[Optimizer], what: str) -> None:
    """Refuse a permanent average at the training point, as the optimizers' states would belong to other parameters."""
    for optimizer in in_train_mode(optimizers):
        raise GossipError(
            f"{what} would average the parameters at which {type(optimizer).__name__} trains, not those to be "
            f"evaluated: call its eval() before {what}, on every rank, and train() before training continues"
        )

"""Models that fail or are late at a named (rank, step): ``model._target_=faulty_models.FailingModel``."""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gossip.elastic.membership_consensus import Consensus
from gossip.lab.experiments.graceful_stop import GracefulStop

TRUSTED = "trusted_targets=[faulty_models]"
FAULTY = ("model._target_=faulty_models.FailingModel", TRUSTED, "~model.hidden")
"""The options of a run with a :class:`FailingModel`."""


class FailingModel(nn.Module):
    """A linear model whose training forward fails on one rank at one step.

    Parameters
    ----------
    rank : int or None
        None: all of them.
    how : str
        "raise" an exception, be "killed", "interrupt" the whole process group as Ctrl-C does, or "block" until somebody
        writes into the named pipe ``pipe``; or "interrupt_check": interrupt when the launching process builds the model
        to check the configuration; "kill_all": kill the whole process group, the launching process too; or "terminate"
        the launching process as SIGTERM does, and go on once this rank is asked to stop; or be "wrong": multiply its
        parameters by 1000.
    dropout : float
        Draws random numbers in every step.
    once : str
        If given, a path: nothing fails while there is a file, and the failure makes it. So a run that goes on does.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        rank: int | None = 1,
        step: int = 3,
        how: str = "raise",
        pipe: str = "",
        dropout: float = 0.0,
        once: str = "",
    ) -> None:
        super().__init__()
        self.once = once
        self.rank, self.step, self.how, self.pipe = rank, step, how, pipe
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.LazyLinear(num_classes))
        self.layers(torch.zeros(1, *input_shape))
        self.steps_made = 0
        if how == "interrupt_check" and "RANK" not in os.environ:
            os.killpg(os.getpgrp(), signal.SIGINT)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.rank in (None, int(os.environ.get("RANK", "-1"))) and self.steps_made == self.step:
                self.fail()
            self.steps_made += 1
        return self.layers(inputs)

    def fail(self) -> None:
        """Fail as ``how`` says."""
        if self.once and Path(self.once).exists():
            return
        if self.once:
            Path(self.once).touch()
        if self.how == "wrong":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(1000)
            return
        if self.how == "raise":
            raise ArithmeticError(f"injected at step {self.step}")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "kill_all":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if self.how == "terminate":
            launcher = multiprocessing.parent_process()
            came: list[int] = []  # no Event: a handler within its wait() needs a lock that this thread has
            before: Any = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, _: (came.append(number), before(number, None))[0])
            os.kill(launcher.pid, signal.SIGTERM)
            found = [each for each in gc.get_objects() if isinstance(each, GracefulStop | Consensus)]
            while not (came and any(map(_is_asked, found))):  # its thread may get no processor for many steps
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, before)
            return
        if self.how == "block":
            Path(self.pipe).read_bytes()
            return
        assert self.how == "interrupt"
        os.killpg(os.getpgrp(), signal.SIGINT)
        signal.pause()


def _is_asked(one: GracefulStop | Consensus) -> bool:
    return one._is_asked if isinstance(one, GracefulStop) else one.ends_at is not None


class RateOfItsTime(LRScheduler):
    """Rates that fall with every step, and are half as high if the scheduler is made while there is a file.

    So only its state has the rates of one that was made before.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, once: str, **_: float) -> None:
        self.scale = 0.5 if Path(once).exists() else 1.0
        self.total_steps = total_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group."""
        return [base * self.scale * (1 - self.last_epoch / (2 * self.total_steps)) for base in self.base_lrs]

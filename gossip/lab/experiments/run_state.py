"""Where a run stands; saved with its model, and restored."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loguru import logger
from torch.optim.lr_scheduler import LRScheduler

import gossip
from gossip import CheckpointError
from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.living_shards import LivingShards
from gossip.lab.experiments.resuming import CHECKPOINT_FOLDER
from gossip.lab.experiments.run_settings import ConfigurationError
from gossip.lab.experiments.run_summary import RankReport
from gossip.lab.experiments.training_methods import Method


class RunState:
    """Where one rank of a run stands and what it has counted: what a checkpoint holds beside the model.

    Parameters
    ----------
    experiment : Experiment
    method : Method
    folder : Path
        Of the run.

    Attributes
    ----------
    scheduler : LRScheduler
    report : RankReport
        Of all steps, those before a checkpoint too.
    step : int
        Number of steps made.
    living_shards : LivingShards or None
        What this rank trains on, where ranks may be lost and join.
    position : int
        The same in terms of the data: ``epoch * steps_per_epoch`` and the steps of the epoch. Another number than
        ``step`` once the number of ranks, and with it the length of an epoch, has changed.
    """

    def __init__(self, experiment: Experiment, method: Method, folder: Path) -> None:
        self._experiment, self._method, self._world = experiment, method, method.world
        self._checkpoints = folder / CHECKPOINT_FOLDER
        self._steps_per_epoch = experiment.shards.steps_per_epoch
        self._all_positions = experiment.total_steps
        self.scheduler: LRScheduler = experiment.make_scheduler(method.optimizer, self._all_positions)
        self.report = RankReport()
        self.living_shards = LivingShards(experiment, method.world) if method.world.changes else None
        self.step = 0
        self.position = 0
        self._started_at = time.perf_counter()
        self._earlier_wall_time_s = 0.0

    @property
    def total_steps(self) -> int:
        """Number of steps when the run ends."""
        return self.step + self._all_positions - self.position

    @property
    def earlier_wall_time_s(self) -> float:
        """Seconds that the run took up to the checkpoint that it was resumed from."""
        return self._earlier_wall_time_s

    def advance(self, record: Mapping[str, Any]) -> None:
        """Count one step."""
        self.report.add(record)
        self.scheduler.step()
        self.step += 1
        self.position += 1

    def save(self) -> None:
        """Write a checkpoint; if that fails, say so and go on. Collective, after a step whose record is written."""
        assert self._method.model is not None
        epoch, step_in_epoch = divmod(self.position, self._steps_per_epoch)
        try:
            gossip.save(
                self._method.model,
                self._checkpoints,
                keep=self._experiment.settings.checkpoint_keep,
                scheduler=self.scheduler,
                report=self.report,
                epoch=epoch,
                step_in_epoch=step_in_epoch,
                steps_per_epoch=self._steps_per_epoch,
                wall_time_s=self._earlier_wall_time_s + time.perf_counter() - self._started_at,
            )
        except CheckpointError as error:  # the same on every rank; all are still in step
            if self._world.rank == 0:
                logger.error("no checkpoint of step {}, training goes on: {}", self.step, error)

    def join(self) -> None:
        """Be where the others are: this rank has joined them. Local.

        Raises
        ------
        ConfigurationError
            The run was resumed: how much of the data it had gone through is known to its ranks alone.
        """
        assert self._method.model is not None
        if self._experiment.settings.resumes:
            raise ConfigurationError(
                "a run that was resumed cannot be joined; start it again, resume=..., with all ranks"
            )
        self.step = self.position = self._method.model.step
        self._renew_scheduler()

    def load(self) -> None:
        """Go on from the newest valid checkpoint. Collective.

        With another number of ranks than it was saved by, the data go on at the same part of the epoch (rounded down
        to whole steps), the learning rate where its schedule is then, and every rank counts on from the report of old
        rank 0.

        Raises
        ------
        CheckpointError
            There is none that fits.
        """
        assert self._method.model is not None
        checkpoint = gossip.load(self._method.model, self._checkpoints, scheduler=self.scheduler, report=self.report)
        data = checkpoint.data
        self.step = checkpoint.step
        self._earlier_wall_time_s = data["wall_time_s"]
        if self._experiment.settings.steps is None:
            self.position = data["epoch"] * self._steps_per_epoch
            self.position += data["step_in_epoch"] * self._steps_per_epoch // data["steps_per_epoch"]
        else:  # the run is as long, however long an epoch is
            self.position = data["epoch"] * data["steps_per_epoch"] + data["step_in_epoch"]
        world_size = self._experiment.settings.world_size
        if checkpoint.world_size != world_size:
            self._renew_scheduler()
            if self._world.rank == 0:
                logger.warning(
                    "the data are divided among {} ranks instead of {}: {} steps per epoch instead of {}, and {} are "
                    "left of the run",
                    world_size,
                    checkpoint.world_size,
                    self._steps_per_epoch,
                    data["steps_per_epoch"],
                    self._all_positions - self.position,
                )

    def _renew_scheduler(self) -> None:
        """A schedule over as many steps as there are now, at its place."""
        for group in self._method.optimizer.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        self.scheduler = self._experiment.make_scheduler(self._method.optimizer, self._all_positions)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for _ in range(self.position):
                self.scheduler.step()

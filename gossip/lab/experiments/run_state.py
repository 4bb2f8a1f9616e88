"""The progress of a run, saved with the model in every checkpoint and restored from it, and its samples.

Which samples a rank has changes while others are lost, leave and join.
"""

import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch.optim.lr_scheduler import LRScheduler

import gossip
from gossip import CheckpointError
from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.partition import Shards
from gossip.lab.experiments.records import Record
from gossip.lab.experiments.resuming import CHECKPOINT_FOLDER
from gossip.lab.experiments.training_methods import Method
from gossip.lab.experiments.validated_models import ConfigurationError


class RunState:
    """The progress of one rank: the content of a checkpoint besides the model.

    Attributes
    ----------
    scheduler, step
        The learning-rate scheduler, and the number of completed steps.
    elastic_shards : ElasticShards or None
        The samples that this rank trains on, where ranks may be lost and may join; otherwise None.
    position : int
        The progress in terms of the data: ``epoch * steps_per_epoch`` plus the completed steps of the current epoch.
        It differs from ``step`` once the number of ranks, and with it the length of an epoch, has changed.
    record : dict or None
        The record of the newest step, while it is completed.
    earlier_wall_time_s : float
        The wall time in seconds up to the checkpoint from which the run was resumed.
    """

    def __init__(self, experiment: Experiment, method: Method, folder: Path) -> None:
        self._experiment, self._method, self._world = experiment, method, method.world
        self._checkpoints = folder / CHECKPOINT_FOLDER
        self._steps_per_epoch = experiment.shards.steps_per_epoch
        self._all_positions = experiment.total_steps
        self.scheduler = self._make_scheduler()
        self.elastic_shards = ElasticShards(experiment, method) if method.world.changes else None
        self.step = 0
        self.position = 0
        self.record: Record | None = None
        self._started_at = time.perf_counter()
        self.earlier_wall_time_s = 0.0

    @property
    def total_steps(self) -> int:
        """The number of steps that will have been completed when the run ends."""
        return self.step + self._all_positions - self.position

    def advance(self) -> None:
        """Count one completed step, and step the scheduler.

        A rank that has come back to the others in that step also counts those that it has missed.
        """
        self.scheduler.step()
        num_steps = 1 if self.elastic_shards is None else self._method.exchanging.step - self.step
        self.step += num_steps
        self.position += num_steps

    def catch_up(self) -> None:
        """Count the steps that this rank has made without samples to reach the step at which all end."""
        while self.step < self._method.exchanging.step:
            self.scheduler.step()
            self.step += 1
            self.position += 1

    def save(self, *, is_last: bool) -> None:
        """Write a checkpoint; a failure is logged and training continues. The last one is complete on return.

        Collective; to be called after a step whose record has been written.
        """
        epoch, step_in_epoch = divmod(self.position, self._steps_per_epoch)
        settings = self._experiment.settings.checkpoint
        try:
            gossip.save(
                self._method.exchanging,
                self._checkpoints,
                keep=settings.keep,
                background=settings.background and not is_last,
                epoch=epoch,
                step_in_epoch=step_in_epoch,
                steps_per_epoch=self._steps_per_epoch,
                wall_time_s=self.earlier_wall_time_s + time.perf_counter() - self._started_at,
            )
        except CheckpointError as error:  # raised on every rank alike, so the ranks remain in step
            if self._world.rank == 0:
                logger.error("no checkpoint of step {}, training goes on: {}", self.step, error)

    def join(self) -> None:
        """Take over the progress of the run that this rank has just joined, unless that was resumed. Local.

        The scheduler has the state of the others' already, because the model keeps it.
        """
        if self._experiment.settings.resume is not None:
            raise ConfigurationError(
                "a run that was resumed cannot be joined; start it again, resume=..., with all ranks"
            )
        self.step = self.position = self._method.exchanging.step

    def load(self) -> None:
        """Resume from the newest valid checkpoint; a CheckpointError if there is none that fits. Collective.

        If the checkpoint was saved by a different number of ranks, the data continue at the same fraction of the epoch
        (rounded down to whole steps), and the learning rate continues at the corresponding point of its schedule.
        """
        checkpoint = gossip.load(self._method.exchanging, self._checkpoints)
        data = checkpoint.data
        self.step = checkpoint.step
        self.earlier_wall_time_s = data["wall_time_s"]
        if self._experiment.settings.training.steps is None:
            self.position = data["epoch"] * self._steps_per_epoch
            self.position += data["step_in_epoch"] * self._steps_per_epoch // data["steps_per_epoch"]
        else:  # the total number of steps is given and does not depend on the length of an epoch
            self.position = data["epoch"] * data["steps_per_epoch"] + data["step_in_epoch"]
        world_size = self._experiment.settings.launch.world_size
        if checkpoint.world_size != world_size:
            self._restart_schedule()
            if self._world.rank == 0:
                ranks = f"the data are divided among {world_size} ranks instead of {checkpoint.world_size}"
                steps = f"{self._steps_per_epoch} steps per epoch instead of {data['steps_per_epoch']}"
                logger.warning("{}: {}, and {} are left of the run", ranks, steps, self._all_positions - self.position)

    def _make_scheduler(self) -> LRScheduler:
        """Return a new scheduler, which the model keeps: on a rank that joins it is in the state of the others'."""
        scheduler = self._experiment.make_scheduler(self._method.optimizer, self._all_positions)
        if self._method.model is not None:
            self._method.model.keep(scheduler=scheduler)
        return scheduler

    def _restart_schedule(self) -> None:
        """Advance a new schedule, over the present total number of steps, to the present position."""
        for group in self._method.optimizer.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        self.scheduler = self._make_scheduler()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for _ in range(self.position):
                self.scheduler.step()


class ElasticShards:
    """The samples of one rank under changing membership; the number of steps and the schedule do not change.

    As long as the initial ranks train, the samples are those of :class:`Shards`. After a change of membership,
    ``data.on_loss`` decides. "redistribute" divides all samples again among the ranks that train, and each rank
    repeats its own samples. The division follows from the seed and these ranks alone, so a rank that joins makes the
    same one as those that have been through more changes. With "leave" every rank keeps its samples: those of a lost
    rank are not trained on until a rank that joins takes them over. With "hold" every step has the samples that it
    would have had without a change, divided among the ranks that train now: only those that a rank has not yet trained
    on in the step in which it is lost are missing.

    Attributes
    ----------
    changes : list of dict
        One entry per change of membership: the "step" from which it applies, the "members" that train from then on (by
        member number) and the members "before".
    """

    def __init__(self, experiment: Experiment, method: Method) -> None:
        self._experiment, self._method = experiment, method
        self._members = tuple(range(experiment.settings.launch.world_size))
        self._dealt: Shards | None = None
        self.changes: list[dict[str, Any]] = []

    def batch(self, step: int) -> torch.Tensor:
        """Return this rank's samples of a step, counted through all epochs, among the ranks that train now."""
        if self._method.members != self._members:
            self._deal(step)
        member = self._method.world.member
        initial = range(self._experiment.settings.launch.world_size)
        if self._experiment.settings.data.on_loss == "hold" and self._members != tuple(initial):
            samples = self._experiment.shards.batch(initial, step)
            return samples.tensor_split(len(self._members))[self._members.index(member)]
        if self._dealt is not None:
            return self._dealt.batch([self._members.index(member)], step)
        return self._experiment.shards.batch([self._shares()[member]], step)

    def _deal(self, step: int) -> None:
        settings, before = self._experiment.settings, self._members
        self._members = self._method.members
        self.changes.append({"step": step, "before": list(before), "members": list(self._members)})
        if settings.data.on_loss == "redistribute":
            seed = settings.seed + zlib.crc32(repr(self._members).encode())
            indices = self._experiment.divide(len(self._members), seed)
            self._dealt = Shards(indices, settings.batch_size, seed, repeats=True)
            words = "all samples are dealt again among them"
        elif settings.data.on_loss == "hold":
            num_samples = settings.launch.world_size * settings.batch_size
            words = f"they divide the {num_samples} samples of each step"
            if num_samples < len(self._members):
                raise ValueError(
                    f"data.on_loss=hold: {len(self._members)} ranks cannot divide the {num_samples} samples of a step; "
                    "begin with a larger training.batch_size, or let fewer ranks join"
                )
        else:
            kept = self._shares().values()
            sizes = [len(shard) for rank, shard in enumerate(self._experiment.shards.indices) if rank not in kept]
            words = f"{sum(sizes)} of {len(self._experiment.data.train_targets)} samples are trained on by nobody"
        if self._method.world.member == self._members[0]:
            ranks = f"{len(self._members)} ranks train in the place of {len(before)}"
            # The message is complete on rank 0 alone; the other ranks need not log it.
            logger.warning("step {}: {}; data.on_loss={}: {}", step, ranks, settings.data.on_loss, words)

    def _shares(self) -> dict[int, int]:
        """Return the initial shard of each member.

        Members that joined take over the shards of members that are gone; once none is left, any shard.
        """
        world_size = self._experiment.settings.launch.world_size
        shares = {member: member for member in self._members if member < world_size}
        free = [rank for rank in range(world_size) if rank not in shares]
        for number, member in enumerate(member for member in self._members if member >= world_size):
            shares[member] = free[number] if number < len(free) else number % world_size
        return shares

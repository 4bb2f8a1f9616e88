"""The checked settings of a run: the part of a configuration that launcher and training loop read directly."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, model_validator

from gossip.lab.experiments.validated_models import Model, read


class _Section(Model):
    """A section of which others read the keys that are not named here."""

    model_config = ConfigDict(extra="ignore")


class TopologySettings(_Section):
    """When ranks exchange.

    Attributes
    ----------
    every : int
        The number of steps per exchange; all but the last of them are local.
    warmup_rounds : int
        The number of rounds of the complete topology before the configured one begins.
    """

    every: int = Field(ge=1)
    warmup_rounds: int = Field(ge=0)


class CheckpointSettings(_Section):
    """When checkpoints are written.

    Attributes
    ----------
    every : int
        The number of steps between two checkpoints; 0 disables checkpoints.
    keep : int
        The number of checkpoints to keep.
    """

    every: int = Field(ge=0)
    keep: int = Field(ge=1)


class TrainingSettings(_Section):
    """The length of a run, and how often it is evaluated.

    Attributes
    ----------
    epochs : int
        The length of the run in epochs.
    steps : int or None
        The number of steps of the whole run, instead of ``epochs``; each rank then repeats its own samples.
    batch_size : int
        The number of samples per rank and step, see :attr:`Settings.batch_size`.
    total_batch_size : int or None
        The number of samples per step of all ranks, instead of ``batch_size``.
    evaluate_every_epochs : int
        The number of epochs between two evaluations on the test split; 0 means only at the end.
    evaluate_every_steps : int
        The number of steps between two additional evaluations; 0 means none.
    consensus_every_steps : int
        The number of steps between two measurements of the consensus distance, each of which costs one global average;
        0 means only where the test split is evaluated.
    """

    epochs: int = Field(ge=1)
    steps: int | None = Field(ge=1)
    batch_size: int = Field(ge=1)
    total_batch_size: int | None = Field(ge=1)
    evaluate_every_epochs: int = Field(ge=0)
    evaluate_every_steps: int = Field(ge=0)
    consensus_every_steps: int = Field(ge=0)

    def evaluates_after(self, steps: int, *, epochs: int | None) -> bool:
        """Whether to evaluate after ``steps`` completed steps.

        Parameters
        ----------
        steps : int
            The number of completed steps.
        epochs : int or None
            The number of completed epochs if the last step ended an epoch; otherwise None.
        """
        return (epochs is not None and every(self.evaluate_every_epochs, epochs)) or every(
            self.evaluate_every_steps, steps
        )


class LaunchSettings(_Section):
    """The ranks.

    Attributes
    ----------
    world_size : int
        The number of ranks.
    local_size : int
        The number of ranks of a group, which train one replica together; with 1, each rank has a replica of its own.
    port : int or None
        The port of the key-value store; None selects a free one.
    timeout_s : float
        The longest time that any wait for other ranks may take.
    num_threads : int or None
        The number of torch threads per rank; None divides the cores of the machine by the number of ranks.
    restart : int
        How many times a failed worker is restarted.
    """

    world_size: int = Field(ge=1)
    local_size: int = Field(ge=1)
    port: int | None = Field(ge=1, le=65535)
    timeout_s: PositiveFloat
    num_threads: int | None = Field(ge=1)
    restart: int = Field(ge=0)


class DataSettings(_Section):
    """What happens to data; a data section of the user's own may omit all of it.

    Attributes
    ----------
    on_loss : str
        What happens to the samples of lost ranks: "redistribute" or "leave".
    """

    on_loss: Literal["redistribute", "leave"] = "redistribute"


class Settings(_Section):
    """The settings of a run: method, duration, ranks and what it records.

    Attributes
    ----------
    method : str
        "gossip", "ddp" (torch's DistributedDataParallel) or "local" (no exchange at all).
    engine : str
        "processes" for one process per rank, or "virtual" for all replicas in one process.
    seed : int
        The seed of the partition, the initial values and the order of the samples.
    figures : bool
        Whether figures are drawn at the end.
    profile : bool
        Whether each rank writes a trace of a few steps.
    resume : object
        What the run resumes from the newest checkpoint in its folder; None begins anew.
    shard : str
        How the ranks of a group share a replica: "none" (each has all of it), "optimizer" or "fsdp".
    """

    method: Literal["gossip", "ddp", "local"]
    engine: Literal["processes", "virtual"]
    seed: int = Field(ge=0)
    figures: bool
    profile: bool
    resume: Any
    shard: Literal["none", "optimizer", "fsdp"]
    topology: TopologySettings
    checkpoint: CheckpointSettings
    training: TrainingSettings
    launch: LaunchSettings
    data: DataSettings

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read and check a resolved configuration.

        Raises
        ------
        ConfigurationError
            A value is missing, of the wrong type or out of range.
        """
        return read(cls, config)

    @property
    def batch_size(self) -> int:
        """The number of samples per rank and step, given directly or by the total over all ranks."""
        total = self.training.total_batch_size
        return self.training.batch_size if total is None else total // self.launch.world_size

    @property
    def num_groups(self) -> int:
        """The number of groups of ranks, which is the number of replicas."""
        return self.launch.world_size // self.launch.local_size

    @property
    def timeout(self) -> timedelta:
        """The longest time that any wait for other ranks may take."""
        return timedelta(seconds=self.launch.timeout_s)

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        world_size, local_size = self.launch.world_size, self.launch.local_size
        total = self.training.total_batch_size
        if total is not None and total % world_size:
            raise ValueError(
                f"training.total_batch_size={total} is no multiple of launch.world_size={world_size}; choose one, or "
                "set training.batch_size"
            )
        if world_size % local_size:
            raise ValueError(
                f"launch.local_size={local_size} does not divide launch.world_size={world_size}; every group has as "
                "many ranks"
            )
        if self.shard != "none" and local_size == 1:
            raise ValueError(
                f"shard={self.shard} divides a replica among the ranks of a group; set launch.local_size to at least 2"
            )
        if local_size > 1 and (self.engine == "virtual" or self.method == "ddp"):
            other = "engine=virtual" if self.engine == "virtual" else "method=ddp"
            raise ValueError(
                f"launch.local_size={local_size}: {other} has no groups of ranks; set launch.local_size=1, or "
                "engine=processes and method=gossip or local"
            )
        if self.engine == "virtual" and self.profile:
            raise ValueError(
                "profile=true is for ranks that are processes, not for engine=virtual; leave it out, or set "
                "engine=processes"
            )
        if self.method == "ddp" and self.checkpoint.every > 0:
            raise ValueError(
                f"checkpoint.every={self.checkpoint.every}: method=ddp cannot save and resume; set "
                "checkpoint.every=0, or method=gossip or local"
            )
        return self


def every(interval: int, count: int) -> bool:
    """Whether ``count`` is a multiple of ``interval``; never if the interval is 0."""
    return interval > 0 and count % interval == 0

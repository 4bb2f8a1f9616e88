"""The checked settings of a run: the part of a configuration that launcher and training loop read directly.

``configs/train.yaml`` and ``configs/launch/local.yaml`` say what each key means.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, model_validator

from gossip.lab.experiments.validated_models import Model
from gossip.step.building.wrapper_arguments import refuse_any


class _Section(Model):
    """A section of which others read the keys that are not named here."""

    model_config = ConfigDict(extra="ignore")


class TopologySettings(_Section):
    """When ranks exchange."""

    every: int = Field(ge=1)
    warmup_rounds: int = Field(ge=0)


class CheckpointSettings(_Section):
    """When checkpoints are written."""

    every: int = Field(ge=0)
    keep: int = Field(ge=1)
    background: bool = False


class TrainingSettings(_Section):
    """The length of a run, and how often it is evaluated."""

    epochs: int = Field(ge=1)
    steps: int | None = Field(ge=1)
    batch_size: int = Field(ge=1)
    total_batch_size: int | None = Field(ge=1)
    evaluate_every_epochs: int = Field(ge=0)
    evaluate_every_steps: int = Field(ge=0)
    consensus_every_steps: int = Field(ge=0)


class LaunchSettings(_Section):
    """The ranks; ``local_size`` of them form a group, which trains one replica together."""

    world_size: int = Field(ge=1)
    local_size: int = Field(ge=1)
    port: int | None = Field(ge=1, le=65535)
    timeout_s: PositiveFloat
    num_threads: int | None = Field(ge=1)
    restart: int = Field(ge=0)


class DataSettings(_Section):
    """What happens to the samples of lost ranks; a data section of the user's own may omit it."""

    on_loss: Literal["redistribute", "leave"] = "redistribute"


class Settings(_Section):
    """The settings of a run: method, duration, ranks and what it records; a resolved configuration has them."""

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
        total, is_virtual, is_ddp = self.training.total_batch_size, self.engine == "virtual", self.method == "ddp"
        refuse_any(
            {
                f"training.total_batch_size={total} is no multiple of launch.world_size={world_size}; choose one, or "
                "set training.batch_size": total is not None and total % world_size != 0,
                f"launch.local_size={local_size} does not divide launch.world_size={world_size}; every group has as "
                "many ranks": world_size % local_size != 0,
                f"shard={self.shard} divides a replica among the ranks of a group; set launch.local_size to at least "
                "2": self.shard != "none" and local_size == 1,
                f"launch.local_size={local_size}: {'engine=virtual' if is_virtual else 'method=ddp'} has no groups of "
                "ranks; set launch.local_size=1, or engine=processes and method=gossip or local": local_size > 1
                and (is_virtual or is_ddp),
                f"checkpoint.every={self.checkpoint.every}: method=ddp cannot save and resume; set checkpoint.every=0, "
                "or method=gossip or local": is_ddp and self.checkpoint.every > 0,
            }
        )
        return self


def every(interval: int, count: int) -> bool:
    """Whether ``count`` is a multiple of ``interval``; never if the interval is 0."""
    return interval > 0 and count % interval == 0

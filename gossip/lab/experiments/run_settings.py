"""The checked settings of a run: the part of a configuration that launcher and training loop read directly."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

METRICS = ("accuracy", "loss")
METHODS = ("gossip", "ddp", "local")
ENGINES = ("processes", "virtual")
SHARDS = ("none", "optimizer", "fsdp")
ON_LOSS = ("redistribute", "leave")


class ConfigurationError(ValueError):
    """The user's configuration cannot be run; the message is one line with the reason and the alternative."""


@dataclass(frozen=True)
class Settings:
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
    exchange_every : int
        The number of steps per exchange; all but the last of them are local.
    warmup_rounds : int
        The number of rounds of the complete topology before the configured one begins.
    profile : bool
        Whether each rank writes a trace of a few steps.
    resumes : bool
        Whether the run is resumed from the newest checkpoint in its folder.
    checkpoint_every : int
        The number of steps between two checkpoints; 0 disables checkpoints.
    checkpoint_keep : int
        The number of checkpoints to keep.
    epochs : int
        The length of the run in epochs.
    steps : int or None
        The number of steps of the whole run, instead of ``epochs``; each rank then repeats its own samples.
    batch_size : int
        The number of samples per rank and step.
    evaluate_every_epochs : int
        The number of epochs between two evaluations on the test split; 0 means only at the end.
    evaluate_every_steps : int
        The number of steps between two additional evaluations; 0 means none.
    consensus_every_steps : int
        The number of steps between two measurements of the consensus distance, each of which costs one global average;
        0 means only where the test split is evaluated.
    world_size : int
        The number of ranks.
    local_size : int
        The number of ranks of a group, which train one replica together; with 1, each rank has a replica of its own.
    shard : str
        How the ranks of a group share a replica: "none" (each has all of it), "optimizer" or "fsdp".
    port : int or None
        The port of the key-value store; None selects a free one.
    timeout : timedelta
        The longest time that any wait for other ranks may take.
    num_threads : int or None
        The number of torch threads per rank; None divides the cores of the machine by the number of ranks.
    restart : int
        How many times a failed worker is restarted.
    on_loss : str
        What happens to the samples of lost ranks: "redistribute" or "leave".
    """

    method: str
    engine: str
    seed: int
    figures: bool
    exchange_every: int
    warmup_rounds: int
    profile: bool
    resumes: bool
    checkpoint_every: int
    checkpoint_keep: int
    epochs: int
    steps: int | None
    batch_size: int
    evaluate_every_epochs: int
    evaluate_every_steps: int
    consensus_every_steps: int
    world_size: int
    local_size: int
    shard: str
    port: int | None
    timeout: timedelta
    num_threads: int | None
    restart: int
    on_loss: str

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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read and check a resolved configuration.

        Raises
        ------
        ConfigurationError
            A value is missing, of the wrong type or out of range.
        """
        settings = cls(
            method=_choice(config, "method", METHODS),
            engine=_choice(config, "engine", ENGINES),
            seed=_integer(config, "seed", minimum=0),
            figures=_boolean(config, "figures"),
            exchange_every=_integer(config, "topology.every", minimum=1),
            warmup_rounds=_integer(config, "topology.warmup_rounds", minimum=0),
            profile=_boolean(config, "profile"),
            resumes=value_of(config, "resume") is not None,
            checkpoint_every=_integer(config, "checkpoint.every", minimum=0),
            checkpoint_keep=_integer(config, "checkpoint.keep", minimum=1),
            epochs=_integer(config, "training.epochs", minimum=1),
            steps=_optional_integer(config, "training.steps", minimum=1),
            batch_size=_batch_size(config),
            evaluate_every_epochs=_integer(config, "training.evaluate_every_epochs", minimum=0),
            evaluate_every_steps=_integer(config, "training.evaluate_every_steps", minimum=0),
            consensus_every_steps=_integer(config, "training.consensus_every_steps", minimum=0),
            world_size=_integer(config, "launch.world_size", minimum=1),
            local_size=_integer(config, "launch.local_size", minimum=1),
            shard=_choice(config, "shard", SHARDS),
            port=_optional_integer(config, "launch.port", minimum=1, maximum=65535),
            timeout=timedelta(seconds=_positive(config, "launch.timeout_s")),
            num_threads=_optional_integer(config, "launch.num_threads", minimum=1),
            restart=_integer(config, "launch.restart", minimum=0),
            on_loss=_on_loss(config),
        )
        settings._check_combinations()
        return settings

    @property
    def num_groups(self) -> int:
        """The number of groups of ranks, which is the number of replicas."""
        return self.world_size // self.local_size

    def _check_combinations(self) -> None:
        if self.world_size % self.local_size:
            raise ConfigurationError(
                f"launch.local_size={self.local_size} does not divide launch.world_size={self.world_size}; every group "
                "has as many ranks"
            )
        if self.shard != "none" and self.local_size == 1:
            raise ConfigurationError(
                f"shard={self.shard} divides a replica among the ranks of a group; set launch.local_size to at least 2"
            )
        if self.local_size > 1 and (self.engine == "virtual" or self.method == "ddp"):
            other = "engine=virtual" if self.engine == "virtual" else "method=ddp"
            raise ConfigurationError(
                f"launch.local_size={self.local_size}: {other} has no groups of ranks; set launch.local_size=1, or "
                "engine=processes and method=gossip or local"
            )
        if self.engine == "virtual" and self.profile:
            raise ConfigurationError(
                "profile=true is for ranks that are processes, not for engine=virtual; leave it out, or set "
                "engine=processes"
            )
        if self.method == "ddp" and self.checkpoint_every > 0:
            raise ConfigurationError(
                f"checkpoint.every={self.checkpoint_every}: method=ddp cannot save and resume; set "
                "checkpoint.every=0, or method=gossip or local"
            )


def every(interval: int, count: int) -> bool:
    """Whether ``count`` is a multiple of ``interval``; never if the interval is 0."""
    return interval > 0 and count % interval == 0


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the words "; did you mean x?" with the closest match to ``name``, or a full stop if there is none."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "."


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key.

    Raises
    ------
    ConfigurationError
        The configuration has no such key.
    """
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigurationError(f"the configuration has no key {key}; set {key}=...")
        value = value[part]
    return value


def _choice(config: Mapping[str, Any], key: str, names: Sequence[str]) -> str:
    name = value_of(config, key)
    if name not in names:
        raise ConfigurationError(f"there is no {key}={name}{nearest(str(name), names)} Available: {', '.join(names)}")
    return str(name)


def _integer(config: Mapping[str, Any], key: str, *, minimum: int, maximum: int | None = None) -> int:
    value = value_of(config, key)
    allowed = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum or (maximum and value > maximum):
        raise ConfigurationError(f"{key} must be an integer {allowed}, got {value!r}")
    return value


def _batch_size(config: Mapping[str, Any]) -> int:
    """Return the batch size of each rank, given directly or by the total over all ranks."""
    total, world_size = value_of(config, "training.total_batch_size"), value_of(config, "launch.world_size")
    if total is None:
        return _integer(config, "training.batch_size", minimum=1)
    _integer(config, "training.total_batch_size", minimum=1)
    if total % world_size:
        raise ConfigurationError(
            f"training.total_batch_size={total} is no multiple of launch.world_size={world_size}; choose one, or set "
            "training.batch_size"
        )
    return int(total // world_size)


def _on_loss(config: Mapping[str, Any]) -> str:
    """Return ``data.on_loss``, which a user's own data section may omit."""
    return _choice(config, "data.on_loss", ON_LOSS) if "on_loss" in value_of(config, "data") else ON_LOSS[0]


def _boolean(config: Mapping[str, Any], key: str) -> bool:
    value = value_of(config, key)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{key} must be true or false, got {value!r}")
    return value


def _optional_integer(config: Mapping[str, Any], key: str, *, minimum: int, maximum: int | None = None) -> int | None:
    return None if value_of(config, key) is None else _integer(config, key, minimum=minimum, maximum=maximum)


def _positive(config: Mapping[str, Any], key: str) -> float:
    value = value_of(config, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigurationError(f"{key} must be a positive number, got {value!r}")
    return float(value)

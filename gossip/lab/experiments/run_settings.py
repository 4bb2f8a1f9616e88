"""The checked settings of a run: the part of a configuration that launcher and training loop read directly.

``configs/train.yaml`` and ``configs/launch/local.yaml`` say what each key means. The signature of
:class:`gossip.GossipDataParallel` determines names, types and defaults of the options in the section ``wrapper``, for
every method and engine, and the wrapper's own argument check the permitted values.

Also the devices of a configured run's ranks, and the backend of their messages.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import AfterValidator, Field, PositiveFloat, model_validator
from torch import nn

from gossip import GossipDataParallel, VirtualWorkers
from gossip.lab.experiments.targets import TARGET
from gossip.lab.experiments.validated_models import ConfigurationError, Model, blaming, shown, value_of
from gossip.step.building.wrapper_arguments import Arguments, check_arguments, refuse_any

SECTION = "wrapper"
ALL_REDUCE_OPTIONS = ("bucket_cap_mb", "clip_grad_norm")
"""The options that also apply to torch's DistributedDataParallel."""
_SAID_ELSEWHERE = {
    "module": "model",
    "optimizer": "optimizer",
    "topology": "topology",
    "algorithm": "algorithm",
    "compression": "compression",
    "timeout": "launch.timeout_s",
}
_ONLY_IN_PROGRAMS = ("scaler", "process_group", "partition_timeout", "on_preemption", "record")
_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(GossipDataParallel).parameters.items()}


def _there(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no GPU here; take cpu or auto")
    return device


Device = Annotated[Literal["auto", "cpu", "cuda"], AfterValidator(_there)]
"""As a setting: auto is cuda where torch finds it."""


def own_device(wanted: str) -> torch.device:
    """Return this rank's device, the current one from now on: a GPU by its number on the node, or the CPU."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(num_local_ranks: int, wanted: str = "auto") -> str:
    """Return the backend for so many ranks on each node: gloo, and NCCL where each has a GPU of its own."""
    has_nccl = wanted != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl and num_local_ranks <= torch.cuda.device_count() else "gloo"


class _Section(Model, extra="ignore"):
    """A section of which others read the keys that are not named here."""


class TopologySettings(_Section):
    """When ranks exchange."""

    every: int = Field(ge=1)
    order: tuple[int, ...] | None = None
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
    device: Device = "auto"


class DataSettings(_Section):
    """What happens to the samples of lost ranks; a data section of the user's own may omit it."""

    on_loss: Literal["redistribute", "leave", "hold"] = "redistribute"


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


def wrapper_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the section, completed by the wrapper's defaults of those that the training loop reads.

    An option that belongs elsewhere is refused.
    """
    section = value_of(config, SECTION)
    for name in section:
        if name in _SAID_ELSEWHERE:
            raise ConfigurationError(f"{SECTION}.{name} is not set here; set {_SAID_ELSEWHERE[name]}=...")
        if name in _ONLY_IN_PROGRAMS:
            raise ConfigurationError(f"{SECTION}.{name} is for programs of your own; leave it out")
    given = {name: value for name, value in section.items() if name != TARGET}
    needed = ("step_in_backward", "clip", *ALL_REDUCE_OPTIONS)
    return given | {name: _DEFAULTS[name] for name in needed if name not in given}


def changed_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options whose values differ from the wrapper's defaults, as they are written on the command line."""
    return {name: f"{SECTION}.{name}={shown(value)}" for name, value in options.items() if value != _DEFAULTS.get(name)}


def options_of_virtual_workers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that :class:`gossip.VirtualWorkers` accepts."""
    names = inspect.signature(VirtualWorkers).parameters
    return {name: value for name, value in options.items() if name in names}


def check_wrapper_options(options: Mapping[str, Any], settings: Settings) -> None:
    """Refuse wrapper options that are incompatible with other settings of the run."""
    if settings.engine == "virtual":
        served = options_of_virtual_workers(options)
        for name, option in changed_options(options).items():
            if name not in served:
                raise ConfigurationError(
                    f"{option} is for ranks that are processes, not for engine=virtual; leave it out, or set "
                    "engine=processes"
                )
    if settings.method == "ddp":
        return
    clips_in_backward = options["clip_grad_norm"] is not None and options["clip"] == "bucket"
    refuse_any(
        {
            "wrapper.clip=bucket clips inside the backward pass, not with wrapper.step_in_backward=false; set "
            "wrapper.clip=global or wrapper.step_in_backward=true": clips_in_backward
            and not options["step_in_backward"],
            f"launch.restart={settings.launch.restart}: a worker that is started again joins others that go on; set "
            "wrapper.on_peer_loss=continue, or launch.restart=0": settings.launch.restart
            and options.get("on_peer_loss") != "continue",
        }
    )


def check_values(options: Mapping[str, Any], module: nn.Module) -> None:
    """Refuse option values that the wrapper itself would refuse. Local."""
    # The clipping norm is checked in any case: with step_in_backward=false the training loop clips, not the wrapper.
    given = {**options, "step_in_backward": True, "optimizer": None}
    arguments = Arguments(**{entry.name: given.get(entry.name, _DEFAULTS[entry.name]) for entry in fields(Arguments)})
    with blaming(SECTION, options):
        check_arguments(arguments, module)

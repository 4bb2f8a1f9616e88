"""The options of :class:`gossip.GossipDataParallel` in the config section ``wrapper``, for every method and engine.

The signature of the wrapper determines their names, types and defaults; the wrapper's own argument check determines
the permitted values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from gossip import GossipDataParallel, VirtualWorkers
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.experiments.targets import TARGET
from gossip.lab.experiments.validated_models import ConfigurationError, blaming, shown, value_of
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
_ONLY_IN_PROGRAMS = ("scaler", "process_group", "partition_timeout", "on_preemption")
_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(GossipDataParallel).parameters.items()}


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

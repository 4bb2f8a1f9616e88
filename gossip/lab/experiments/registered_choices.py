"""What a user's modules have registered, offered on the command line like the files of a group: ``topology=name``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import topologies
from gossip.lab.experiments.experiment_build import import_modules

TOPOLOGY = "topology"
_IMPORTS = "imports="
_NEEDED = "???"
"""omegaconf's mark of a value that must be set."""


def offer(arguments: Sequence[str], config_folder: Path) -> None:
    """Import what the command line says, and let hydra choose what that registers by its name. Local.

    Parameters
    ----------
    arguments : sequence of str
        Of the command line.
    config_folder : Path
        Where the groups are: what has a file there is chosen by that.

    Raises
    ------
    ConfigurationError
        A module cannot be imported.
    """
    from hydra.core.config_store import ConfigStore

    for argument in arguments:
        if argument.startswith(_IMPORTS):
            import_modules({"imports": _value(argument)})
    for name in registered(config_folder):
        ConfigStore.instance().store(name, {"name": name, "options": options_of(name)}, group=TOPOLOGY)


def registered(config_folder: Path) -> Iterator[str]:
    """The names of topologies that have no file."""
    for name in topologies.available():
        if not (config_folder / TOPOLOGY / f"{name}.yaml").is_file():
            yield name


def summary_of(name: str) -> str:
    """The first line of a registered topology's docstring."""
    return (inspect.getdoc(topologies.family(name)) or "").partition("\n")[0]


def options_of(name: str) -> dict[str, Any]:
    """The options of a registered topology with their defaults; those without one have to be set."""
    _, *parameters = inspect.signature(topologies.family(name)).parameters.values()
    return {
        parameter.name: _NEEDED if parameter.default is parameter.empty else parameter.default
        for parameter in parameters
    }


def _value(argument: str) -> Any:
    """What an argument sets; nothing, if hydra cannot read it and will say so."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return ()

"""What a user's modules have registered, offered on the command line like the files of a group: ``topology=name``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip import ALGORITHMS, COMPRESSIONS
from gossip.lab.experiments.experiment_build import import_modules
from topologies.family_registry import FAMILIES
from topologies.registry import Registry

REGISTRIES: Mapping[str, Registry[Any]] = {
    "topology": FAMILIES,
    "algorithm": ALGORITHMS,
    "compression": COMPRESSIONS,
}
"""By the group of the configuration."""

_IMPORTS = "imports="
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
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
    for group in REGISTRIES:
        for name in registered(group, config_folder):
            ConfigStore.instance().store(name, {"name": name, "options": options_of(group, name)}, group=group)


def registered(group: str, config_folder: Path) -> Iterator[str]:
    """The names of a group that have no file."""
    for name in REGISTRIES[group].available() if group in REGISTRIES else ():
        if not (config_folder / group / f"{name}.yaml").is_file():
            yield name


def summary_of(group: str, name: str) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(REGISTRIES[group].get(name)) or "").partition("\n")[0]


def options_of(group: str, name: str) -> dict[str, Any]:
    """Those of a registered name; a topology's first argument is the world size."""
    return plain_options(REGISTRIES[group].get(name), leaving_out=int(group == "topology"))


def plain_options(make: Callable[..., Any], *, leaving_out: int = 0) -> dict[str, Any]:
    """The options that have plain defaults, with these; and those that have to be set; but for the first arguments."""
    parameters = list(inspect.signature(make).parameters.values())
    return {
        parameter.name: _NEEDED if parameter.default is parameter.empty else parameter.default
        for parameter in parameters[leaving_out:]
        if parameter.default is parameter.empty or isinstance(parameter.default, _PLAIN)
    }


def _value(argument: str) -> Any:
    """What an argument sets; nothing, if hydra cannot read it and will say so."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return ()

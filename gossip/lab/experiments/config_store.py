"""Names that a user's modules have registered, selectable on the command line like config files: ``topology=name``."""

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
"""The registries, keyed by the config group that they extend."""

_IMPORTS = "imports="
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_NEEDED = "???"
"""OmegaConf's marker for a mandatory value."""


def offer(arguments: Sequence[str], config_folder: Path) -> None:
    """Import the modules named by ``imports=`` and make the names that they register selectable in hydra. Local.

    Parameters
    ----------
    arguments : sequence of str
        The command-line arguments.
    config_folder : Path
        The folder of the config groups. A name that has a file there is not registered again; the file is used.

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
    """Yield the registered names of a config group that have no file of their own in ``config_folder``."""
    for name in REGISTRIES[group].available() if group in REGISTRIES else ():
        if not (config_folder / group / f"{name}.yaml").is_file():
            yield name


def summary_of(group: str, name: str) -> str:
    """Return the first line of the docstring of a registered name."""
    return (inspect.getdoc(REGISTRIES[group].get(name)) or "").partition("\n")[0]


def options_of(group: str, name: str) -> dict[str, Any]:
    """Return the options of a registered name; a topology's first argument, the world size, is not among them."""
    return plain_options(REGISTRIES[group].get(name), leaving_out=int(group == "topology"))


def plain_options(make: Callable[..., Any], *, leaving_out: int = 0) -> dict[str, Any]:
    """Return the options of a callable with their defaults; required options are marked as mandatory.

    Options whose default is not plain data are omitted.

    Parameters
    ----------
    make : callable
        The function or class whose signature is read.
    leaving_out : int
        The number of leading parameters to skip.
    """
    parameters = list(inspect.signature(make).parameters.values())
    return {
        parameter.name: _NEEDED if parameter.default is parameter.empty else parameter.default
        for parameter in parameters[leaving_out:]
        if parameter.default is parameter.empty or isinstance(parameter.default, _PLAIN)
    }


def _value(argument: str) -> Any:
    """Return the value that an override assigns, or ``()`` if it cannot be parsed; hydra reports such errors later."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return ()

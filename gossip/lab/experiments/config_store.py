"""What the command line can choose besides config files: ``topology=name`` of a user's module, ``data=module:make``."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip import ALGORITHMS, COMPRESSIONS
from gossip.lab.experiments.experiment_build import import_modules
from gossip.lab.experiments.targets import OPTION, TARGET, locate, trusting
from topologies.registry import Registry
from topologies.topology import FAMILIES

REGISTRIES: Mapping[str, Registry[Any]] = {"topology": FAMILIES, "algorithm": ALGORITHMS, "compression": COMPRESSIONS}
"""The registries, keyed by the config group that they extend."""

OWN: Mapping[str, str] = {
    "data": "my_module:function for a function of your own that returns the data",
    "model": "my_module:Class for a model of your own",
}
"""The groups in which an object of a user's module may be named in place of a file, and how that is written."""

_GIVEN_BY_THE_RUN = {"data": 0, "model": 2}  # leading arguments: a model's input shape and number of classes
_OF_EVERY_DATA_SET = ("partition", "on_loss")
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_IMPORTS = "imports="
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_NEEDED = "???"
"""OmegaConf's marker for a mandatory value."""


def offer(arguments: Sequence[str], config_folder: Path) -> list[str]:
    """Make what the user's modules register, and what is named as ``module:name``, selectable in hydra. Local.

    The modules of ``imports=`` are imported, and the names that they register become selectable unless
    ``config_folder``, the folder of the config groups, has a file of that name. Returns the arguments with the
    ``trusted_targets`` option extended: a user who names code on the command line trusts it.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance().store
    for argument in arguments:
        if argument.startswith(_IMPORTS):
            import_modules({"imports": _value(argument)})
    for group in REGISTRIES:
        for name in registered(group, config_folder):
            store(name, {"name": name, "options": options_of(group, name)}, group=group)
    trusted = []
    for argument in arguments:
        group, _, value = argument.partition("=")
        for name in filter(_OWN.fullmatch, value.split(",") if group in OWN else ()):
            target = name.replace(":", ".")
            make = locate(group, target)
            node = {TARGET: target, **plain_options(make, leaving_out=_GIVEN_BY_THE_RUN[group])}
            if group == "data":
                of_digits: Any = OmegaConf.load(config_folder / "data" / "digits.yaml")
                node |= {key: of_digits[key] for key in _OF_EVERY_DATA_SET}
            store(name, node, group=group)
            trusted.append(target)
    return _trusting(arguments, trusted)


def registered(group: str, config_folder: Path) -> Iterator[str]:
    """Yield the registered names of a config group that have no file of their own in ``config_folder``."""
    for name in REGISTRIES[group].available() if group in REGISTRIES else ():
        if not (config_folder / group / f"{name}.yaml").is_file():
            yield name


def options_of(group: str, name: str) -> dict[str, Any]:
    """Return the options of a registered name; a topology's first argument, the world size, is not among them."""
    return plain_options(REGISTRIES[group].get(name), leaving_out=int(group == "topology"))


def plain_options(make: Callable[..., Any], *, leaving_out: int) -> dict[str, Any]:
    """Return the options of a callable, after so many parameters, with their defaults; required ones are mandatory.

    Options whose default is not plain data are omitted.
    """
    return {
        parameter.name: _NEEDED if parameter.default is parameter.empty else parameter.default
        for parameter in list(inspect.signature(make).parameters.values())[leaving_out:]
        if parameter.default is parameter.empty or isinstance(parameter.default, _PLAIN)
    }


def plain(config: Any, *, complete: bool = True) -> dict[str, Any]:
    """Return a configuration of hydra's as plain values."""
    from omegaconf import OmegaConf

    container = OmegaConf.to_container(config, resolve=True, throw_on_missing=complete)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _value(argument: str) -> Any:
    """Return the value that an override assigns, or ``()`` if it cannot be parsed; hydra reports such errors later."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return ()


def _trusting(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments with a ``trusted_targets`` option that includes these names.

    It is inserted before the first ``module:name``, because hydra reads no overrides after an option such as -m.
    """
    if not names:
        return list(arguments)
    found = [argument for argument in arguments if argument.startswith(f"{OPTION}=[")]
    option = trusting(names, [name for argument in found for name in _value(argument)])
    place = next(place for place, argument in enumerate(arguments) if _OWN.search(argument))
    return [each for each in [*arguments[:place], option, *arguments[place:]] if each not in found]

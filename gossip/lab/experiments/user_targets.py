"""A user's own data sets and models, selected on the command line by import path: ``data=my_module:make``."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossip.lab.experiments.config_store import plain_options
from gossip.lab.experiments.targets import OPTION, TARGET, locate
from gossip.lab.experiments.validated_models import ConfigurationError


@dataclass(frozen=True)
class Own:
    """A config group for which the command line may name an object of a user's module in place of a file.

    Attributes
    ----------
    written : str
        The notation on the command line.
    meaning : str
        The meaning of the notation, for help texts and error messages.
    num_given : int
        The number of leading arguments that the run passes itself: for a model, the input shape and the number of
        classes.
    """

    written: str
    meaning: str
    num_given: int


OWN: Mapping[str, Own] = {
    "data": Own("my_module:function", "a function of your own that returns the data", 0),
    "model": Own("my_module:Class", "a model of your own", 2),
}
"""The user-defined choices, keyed by config group."""

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_OF_EVERY_DATA_SET = ("partition", "on_loss")


def offer(arguments: Sequence[str], config_folder: Path) -> list[str]:
    """Make the objects that the command line names as ``module:name`` selectable in hydra. Local.

    A user who names code on the command line trusts it: it is added to ``trusted_targets``.

    Parameters
    ----------
    arguments : sequence of str
        The command-line arguments.
    config_folder : Path
        The folder of the config groups.

    Returns
    -------
    list of str
        The arguments, with the ``trusted_targets`` option extended.

    Raises
    ------
    ConfigurationError
        A module or a name in it cannot be imported.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    trusted = []
    for argument in arguments:
        group, _, value = argument.partition("=")
        for name in value.split(",") if group in OWN else ():
            if not _OWN.fullmatch(name):
                continue
            target = name.replace(":", ".")
            node: dict[str, Any] = {
                TARGET: target,
                **plain_options(_located(group, name), leaving_out=OWN[group].num_given),
            }
            if group == "data":
                of_digits: Any = OmegaConf.load(config_folder / "data" / "digits.yaml")
                node |= {key: of_digits[key] for key in _OF_EVERY_DATA_SET}
            ConfigStore.instance().store(name, node, group=group)
            trusted.append(target)
    return _trusting(arguments, trusted)


def _located(group: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{group}={name} cannot be imported: {error}; put its folder on the path, PYTHONPATH=folder (PYTHONPATH=. "
            "for this one)"
        ) from error
    try:
        return locate(group, f"{module}.{attribute}")
    except ConfigurationError as error:
        near = difflib.get_close_matches(attribute, vars(sys.modules[module]), n=1)
        hint = f"; did you mean {module}:{near[0]}?" if near else ""
        raise ConfigurationError(f"{group}={name}: {module} has no {attribute}{hint}") from error


def _trusting(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments with a ``trusted_targets`` option that includes these names.

    It is inserted before the first ``module:name``, because hydra reads no overrides after an option such as -m.
    """
    if not names:
        return list(arguments)
    found = [argument for argument in arguments if argument.startswith(f"{OPTION}=[")]
    earlier = [name for argument in found for name in argument.partition("[")[2].rstrip("]").split(",") if name]
    trusting = f"{OPTION}=[{','.join(dict.fromkeys([*earlier, *names]))}]"
    place = next(place for place, argument in enumerate(arguments) if _OWN.search(argument))
    return [each for each in [*arguments[:place], trusting, *arguments[place:]] if each not in found]

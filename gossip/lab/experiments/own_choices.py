"""A user's own data sets and models, chosen on the command line by where they are defined: ``data=my_module:make``."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossip.lab.experiments.registered_choices import plain_options
from gossip.lab.experiments.run_settings import ConfigurationError
from gossip.lab.experiments.targets import OPTION, TARGET, locate


@dataclass(frozen=True)
class Own:
    """What the command line may name of a user's own modules in place of a group's file.

    Attributes
    ----------
    written : str
        How it is written.
    meaning : str
        What it stands for.
    num_given : int
        How many arguments the run passes first: a model's are the input shape and the number of classes.
    """

    written: str
    meaning: str
    num_given: int


OWN: Mapping[str, Own] = {
    "data": Own("my_module:function", "a function of your own that returns the data", 0),
    "model": Own("my_module:Class", "a model of your own", 2),
}
"""By the group of the configuration."""

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_OF_EVERY_DATA_SET = ("partition", "on_loss")


def offer(arguments: Sequence[str], config_folder: Path) -> list[str]:
    """Let hydra choose what the command line names as ``module:name``. Local.

    Whoever names code in the command trusts it: it is added to ``trusted_targets``.

    Parameters
    ----------
    arguments : sequence of str
        Of the command line.
    config_folder : Path
        Where the groups are.

    Returns
    -------
    list of str
        The arguments with what is trusted.

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
    """The arguments, with one that trusts these names too before all others: options such as -m end hydra's."""
    if not names:
        return list(arguments)
    found = [argument for argument in arguments if argument.startswith(f"{OPTION}=[")]
    earlier = [name for argument in found for name in argument.partition("[")[2].rstrip("]").split(",") if name]
    trusting = f"{OPTION}=[{','.join(dict.fromkeys([*earlier, *names]))}]"
    place = next(place for place, argument in enumerate(arguments) if _OWN.search(argument))
    return [each for each in [*arguments[:place], trusting, *arguments[place:]] if each not in found]

"""One-line messages for errors of hydra and OmegaConf, with a suggestion of what the user probably meant."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.config_store import registered
from gossip.lab.experiments.user_targets import OWN
from gossip.lab.experiments.validated_models import ConfigurationError, nearest

_BRACKETS = {"[": "]", "{": "}", "(": ")"}


def explain(error: BaseException, config_folder: Path, config_name: str = "train") -> str | None:
    """Return a one-line message for a failed hydra composition or a folder that cannot be created.

    None for any other error.

    Parameters
    ----------
    error : exception
        The error to explain.
    config_folder : Path
        The folder of the config groups.
    config_name : str
        The name of the primary config; only its keys are suggested.
    """
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        # For a list of files, hydra does not report the available options.
        names = sorted(error.options or (path.stem for path in (config_folder / group).glob("*.yaml")))
        own = f"; {group}={OWN[group].written} for {OWN[group].meaning}" if group in OWN else ""
        return f"there is no {group}={name}{nearest(name, names)} Available: {', '.join(names)}{own}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value; set it: {error.full_key}=..."
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, str(error))
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if isinstance(error, HydraException) and ambiguous:
        key, _, values = ambiguous[1].partition("=")
        return f"{key}={values} are several values: add -m for a run of each, or write a list as {key}=[{values}]"
    unknown = re.match(r"Could not (?:override|delete from config\.) '([^']*)'", str(error))
    if isinstance(error, HydraException) and unknown:
        return f"the configuration has no key {unknown[1]}{_instead_of(unknown[1], config_folder, config_name)}"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return _unnamed_file(config_folder)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; output_root=... says where run folders are made"
    if isinstance(error, HydraException | OmegaConfBaseException):
        lines = [_first_line(error)]
        if isinstance(error.__cause__, HydraException | OmegaConfBaseException):
            lines.append(_first_line(error.__cause__))
        place = re.search(r"full_key: (\S+)", str(error))
        return ": ".join([*([] if place is None else [f"{place[1]} cannot be resolved"]), *lines])
    return None


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse arguments that begin with a dash and are not flags of hydra, which would answer with its full usage.

    Raises
    ------
    ConfigurationError
        A flag is unknown, or takes no value but was given one.
    """
    from hydra._internal.utils import get_args_parser

    flags = {name: action for action in get_args_parser()._actions for name in action.option_strings}
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not name.startswith("-") or name == "--":
            continue
        meant = [flag for flag in flags if flag == name or (name.startswith("--") and flag.startswith(name))]
        if not meant:
            raise ConfigurationError(
                f"there is no flag {name}{nearest(name, list(flags))} Options are written without dashes, option=value"
            )
        if equals and flags[meant[0]].nargs == 0:
            raise ConfigurationError(f"{argument}: {name} takes no value; write {name}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unreadable(override: str, text: str) -> str:
    """Explain an argument that is not of the form ``option=value``."""
    if "=" not in override and not override.startswith("~"):
        return f"{override} has no value; write {override}=..., and --help for the options that there are"
    key, _, value = override.partition("=")
    open_brackets: list[str] = []
    for sign in value:
        if sign in _BRACKETS:
            open_brackets.append(sign)
        elif sign in _BRACKETS.values() and (not open_brackets or _BRACKETS[open_brackets.pop()] != sign):
            return f"{key}={value} closes a bracket that is not open: {sign}; write a list as {key}=[1,2]"
    if open_brackets:
        bracket = open_brackets[-1]
        return f"{key}={value} does not close its bracket {bracket}; write a list as '{key}=[1,2]', in quotes"
    if any(override.count(quote) % 2 for quote in "'\""):
        return f"{override} does not close its quote; write '{key.lstrip(chr(39))}=value'"
    reason = text.strip().splitlines()[-1 if text.startswith("Error parsing") else 0]
    return f"{override} is no option=value ({reason}); quote what is to be one text: '{key}=\"{value}\"'"


def _unnamed_file(config_folder: Path) -> str:
    """Explain an override of a config group whose value is not the name of a file."""
    for argument in sys.argv[1:]:
        key, equals, value = argument.partition("=")
        folder = config_folder / key
        if key and equals and folder.is_dir():
            names = sorted(path.stem for path in folder.glob("*.yaml"))
            if value not in names:
                return f"{argument} names no file of the group {key}. Available: {', '.join(names)}"
        elif equals and not key:
            return f"{argument} has no option before its =; write option=value, and --help for those that there are"
    return "a group takes the name of one of its files, as in topology=ring"


def _instead_of(key: str, config_folder: Path, config_name: str) -> str:
    """Suggest a key of this configuration, or a file of a config group that has the key."""
    known = sorted(set(_keys_of_this(config_folder, config_name)))
    last = key.rpartition(".")[2]
    own = [candidate for candidate in known if not candidate.startswith("hydra.")]
    same_end = [candidate for candidate in own if candidate.rpartition(".")[2] == last]
    if same_end:
        return f"; did you mean {same_end[0]}?"
    group = key.partition(".")[0]
    having = [
        (candidate, f"{folder}={name}")
        for folder, name, keys in _files(config_folder)
        for candidate in keys
        if candidate == key or (folder == group and candidate.rpartition(".")[2] == last)
    ]
    if having:
        files = ", ".join(dict.fromkeys(file for _, file in having))
        return f"; {'it' if having[0][0] == key else having[0][0]} is an option of {files}"
    close = difflib.get_close_matches(key, known if key.startswith("hydra") else own, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; --help shows those that there are"


def _keys_of_this(config_folder: Path, config_name: str) -> Iterator[str]:
    """Yield every key of the configuration, composed with the chosen files, and the names of its config groups."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    chosen = list(_chosen_files(sys.argv[1:], config_folder))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder), version_base="1.3"):
            config = compose(config_name, chosen, return_hydra_config=True)
    except HydraException:  # the chosen files cannot be combined
        return
    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)
    yield from (key for key in _flatten(content, ""))
    yield from {group for group, _, _ in _files(config_folder)} & content["hydra"]["runtime"]["choices"].keys()


def _chosen_files(arguments: Sequence[str], config_folder: Path) -> Iterator[str]:
    for argument in arguments:
        group, _, name = argument.partition("=")
        names = name[1:-1].split(",") if name.startswith("[") else [name]  # such as logger=[jsonl,wandb]
        has_files = group and all((config_folder / group / f"{each.strip()}.yaml").is_file() for each in names)
        if has_files or name in registered(group, config_folder):
            yield argument


def _files(config_folder: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Yield group, name and keys of every file of a config group, except experiments, which repeat keys of others."""
    from omegaconf import OmegaConf

    for path in sorted(config_folder.rglob("*.yaml")):
        group = path.relative_to(config_folder).parent.as_posix()
        if group not in (".", "experiment"):
            yield group, path.stem, set(_flatten(OmegaConf.to_container(OmegaConf.load(path)), f"{group}."))


def _flatten(content: Any, prefix: str) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield f"{prefix}{key}"
            yield from _flatten(value, f"{prefix}{key}.")

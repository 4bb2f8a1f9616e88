"""Hydra's and omegaconf's errors in one line, with what the user probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gossip.experiments.settings import nearest


def explain(error: BaseException, config_folder: Path) -> str | None:
    """One line for an error of hydra's composition or of a folder that cannot be made; None for any other error.

    Parameters
    ----------
    error : exception
    config_folder : Path
        Where the groups are.
    """
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        names = sorted(error.options)
        return f"there is no {group}={name}{nearest(name, names)} Available: {', '.join(names)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value; set it: {error.full_key}=..."
    unknown = re.match(r"Could not override '([^']*)'", str(error))
    if isinstance(error, HydraException) and unknown:
        key = unknown[1]
        known = sorted(set(_keys(config_folder)))
        hint = "; another option of the group has it" if key in known else nearest(key, known)
        return f"the configuration has no key {key}{hint}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; output_root=... says where run folders are made"
    if isinstance(error, HydraException | OmegaConfBaseException):
        lines = [_first_line(error)]
        if isinstance(error.__cause__, HydraException | OmegaConfBaseException):
            lines.append(_first_line(error.__cause__))
        return ": ".join(lines)
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _keys(config_folder: Path) -> Iterator[str]:
    """Every key of every file, as it is written on the command line, and the names of the groups."""
    from omegaconf import OmegaConf

    for path in config_folder.rglob("*.yaml"):
        group = path.relative_to(config_folder).parent.as_posix()
        if group == "experiment":  # these repeat keys of others
            continue
        if group != ".":
            yield group
        yield from _flatten(OmegaConf.to_container(OmegaConf.load(path)), "" if group == "." else f"{group}.")


def _flatten(content: Any, prefix: str) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield f"{prefix}{key}"
            yield from _flatten(value, f"{prefix}{key}.")

"""Composes configurations as scripts do, without running hydra's command line."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from repository import CONFIGS

from gossip.lab.experiments.resuming import continued_configuration

CommandLine = Callable[..., tuple[int, str]]
"""Takes arguments; the exit status, and what was written to stderr."""


def composed(*overrides: str, command: str = "train") -> dict[str, Any]:
    """The resolved, plain configuration."""
    return copy.deepcopy(_composed(command, overrides))


def continued(folder: Path, *overrides: str) -> dict[str, Any]:
    """That with which the run in a folder goes on, where the command line has these overrides."""
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    return continued_configuration(folder, composed(f"resume={folder}", *overrides), composed(), keys)


@functools.cache
def _composed(command: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = OmegaConf.to_container(compose(command, list(overrides)), resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}

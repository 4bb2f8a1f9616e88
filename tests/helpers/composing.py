"""Composes configurations as scripts/train.py does, without running hydra's command line."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from repository import CONFIGS

CommandLine = Callable[..., tuple[int, str]]
"""Takes arguments; the exit status, and what was written to stderr."""


def composed(*overrides: str) -> dict[str, Any]:
    """The resolved, plain configuration."""
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = OmegaConf.to_container(compose("train", list(overrides)), resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}

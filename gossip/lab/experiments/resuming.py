"""A run that goes on in its own folder: with which configuration, and whether there is anything to go on from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from gossip import CheckpointError
from gossip.checkpoints.checkpoint_folder import age_key, find_checkpoints
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.run_settings import ConfigurationError
from gossip.lab.experiments.targets import OPTION, check_imports, trusted_names

CHECKPOINT_FOLDER = "checkpoints"
MAY_CHANGE = ("launch", "checkpoint", "profile", "engine", "logger", "logging")
"""What of a configuration is no part of the mathematics. (The number of ranks is, but it is said and wanted.)"""

_NOT_SET = object()


def folder_to_use(output_root: str, name: str, resume: str | None) -> str:
    """The folder of a run that begins, or of the one that goes on.

    Raises
    ------
    ConfigurationError
        ``resume`` is no run's folder.
    """
    if resume is None:
        if not output_root:
            raise ConfigurationError("output_root= names no folder; write output_root=. for the current one")
        return f"{output_root}/{name}"
    if not (Path(resume) / run_folder.CONFIG_FILE).is_file():
        raise ConfigurationError(
            f"resume={resume}: there is no run in it ({run_folder.CONFIG_FILE}); name the folder of a run"
        )
    return str(resume)


def continued_configuration(
    folder: Path, asked: Mapping[str, Any], defaults: Mapping[str, Any], keys: Iterable[str]
) -> dict[str, Any]:
    """The configuration of the run in ``folder``, with what may change as it is asked for now. Local.

    Parameters
    ----------
    folder : Path
    asked, defaults : mapping
        What the command line amounts to for a run that begins, and what no overrides at all amount to.
    keys : iterable of str
        What the command line sets: keys with dots, or groups.

    Raises
    ------
    ConfigurationError
        What is asked for now is another run; the text names every key that differs, with both values.
    """
    config = saved_configuration(folder)
    check_imports(config, asked, str(folder / run_folder.CONFIG_FILE))
    config[OPTION] = list(trusted_names(asked))  # a folder cannot say that it is to be trusted
    saved, now, without = (dict(_leaves(tree)) for tree in (config, asked, defaults))
    prefixes = tuple(keys)
    wanted = {
        key
        for key in (*now, *saved)
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
        or (key in now and now[key] != without.get(key, _NOT_SET))  # an experiment's keys are anywhere
    }
    different = sorted(key for key in wanted - {"resume"} if saved.get(key, _NOT_SET) != now.get(key, _NOT_SET))
    refused = [key for key in different if key.partition(".")[0] not in MAY_CHANGE]
    if refused:
        texts = [f"{key} is {_text(saved, key)} there and {_text(now, key)} here" for key in refused]
        raise ConfigurationError(
            f"resume={asked['resume']} goes on as that run was configured, but {', '.join(texts)}; leave that out, or "
            "begin another run"
        )
    if "logger" in prefixes:
        config["logger"] = asked.get("logger") or {}  # a choice of files, which takes the place of the one there
    for key in different:
        if key in now:
            *path, last = key.split(".")
            target = config
            for part in path:
                target = target.setdefault(part, {})
            target[last] = now[key]
    return config | {"resume": str(asked["resume"])}


def saved_configuration(folder: Path) -> dict[str, Any]:
    """With which the run in ``folder`` was begun, or has gone on. Local.

    Raises
    ------
    ConfigurationError
        It cannot be read.
    """
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / run_folder.CONFIG_FILE))
    except Exception as error:  # of omegaconf, of yaml, of the system
        raise ConfigurationError(f"{folder / run_folder.CONFIG_FILE} cannot be read: {error}") from error
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def check_resumable(folder: Path) -> None:
    """Raise unless the run in ``folder`` has not ended and has a checkpoint; forget why it failed. Local, locked.

    Raises
    ------
    ConfigurationError
        It has ended, or there is no checkpoint.
    """
    summary = folder / run_folder.SUMMARY_FILE
    try:
        if json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed":
            raise ConfigurationError(f"the run in {folder} has ended ({summary.name}): there is nothing to resume")
    except (OSError, LookupError, TypeError, json.JSONDecodeError):  # killed before it could write, or while it did
        pass
    checkpoints = folder / CHECKPOINT_FOLDER
    try:
        found = find_checkpoints(checkpoints)
    except CheckpointError:
        found = []
    if not found:
        raise ConfigurationError(
            f"the run in {folder} has left no checkpoint in {checkpoints.name}/ to go on from; begin it anew, with "
            "checkpoint.every=... steps"
        )
    summary.unlink(missing_ok=True)
    changed = run_folder.changed_versions(folder)
    if changed:
        logger.warning("not bit for bit what it would have been: {}", ", ".join(changed))


def advice(folder: Path, config: Mapping[str, Any]) -> str:
    """One line on how the run in ``folder``, which has ended before its time, goes on. Local."""
    try:
        newest = find_checkpoints(folder / CHECKPOINT_FOLDER)[0]
    except (CheckpointError, IndexError):
        none = "there is no checkpoint to go on from"
        if config.get("method") == "ddp":
            return f"{none}: method=ddp saves none"
        return f"{none}; checkpoint.every=N saves one every N steps"
    where = folder.resolve()
    shown = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
    again = [f" {name}=[{','.join(config[name])}]" for name in ("imports", OPTION) if config.get(name)]
    return f"go on from step {age_key(newest)[0]} with resume={shown}{''.join(again)}"


def all_overrides(folder: Path, overrides: Sequence[str]) -> list[str]:
    """What the user has set for this run from its beginning on. Local."""
    earlier = run_folder.read_overrides(folder)
    return earlier + [option for option in overrides if option not in earlier and not option.startswith("resume=")]


def _leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], default=str) if key in leaves else "not set"

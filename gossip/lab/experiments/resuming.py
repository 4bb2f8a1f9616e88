"""Resuming a run in its own folder: the configuration that applies, and whether there is a usable checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from gossip import CheckpointError
from gossip.checkpoints.checkpoint_folder import age_key, find_checkpoints
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.targets import OPTION, check_imports, trusted_names
from gossip.lab.experiments.validated_models import ConfigurationError

CHECKPOINT_FOLDER = "checkpoints"
MAY_CHANGE = ("launch", "checkpoint", "profile", "engine", "logger", "logging")
"""Config sections that may change on resume because they do not affect the mathematics.

(The number of ranks does, but it is changed explicitly and deliberately.)
"""

_NOT_SET = object()


def folder_to_use(output_root: str, name: str, resume: str | None) -> str:
    """Return the folder of a new run or, with ``resume``, of the run to resume.

    Raises
    ------
    ConfigurationError
        ``resume`` is not the folder of a run, or ``output_root`` is empty.
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
    """Return the configuration of the run in ``folder``, with the present values of what may change. Local.

    Parameters
    ----------
    folder : Path
        The folder of the run.
    asked, defaults : mapping
        The configuration that the command line would give a new run, and the one without any overrides.
    keys : iterable of str
        The dotted keys and config groups that the command line sets.

    Raises
    ------
    ConfigurationError
        The command line describes a different run; the message names every key that differs, with both values.
    """
    config = saved_configuration(folder)
    check_imports(config, asked, str(folder / run_folder.CONFIG_FILE))
    config[OPTION] = list(trusted_names(asked))  # a folder must not declare itself trusted
    saved, now, without = (dict(_leaves(tree)) for tree in (config, asked, defaults))
    prefixes = tuple(keys)
    wanted = {
        key
        for key in (*now, *saved)
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
        or (key in now and now[key] != without.get(key, _NOT_SET))  # an experiment file can set keys of any section
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
        config["logger"] = asked.get("logger") or {}  # a selection of files, which replaces the saved one
    for key in different:
        if key in now:
            *path, last = key.split(".")
            target = config
            for part in path:
                target = target.setdefault(part, {})
            target[last] = now[key]
    return config | {"resume": str(asked["resume"])}


def saved_configuration(folder: Path) -> dict[str, Any]:
    """Read the configuration with which the run in ``folder`` was started or last resumed. Local.

    Raises
    ------
    ConfigurationError
        The configuration cannot be read.
    """
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / run_folder.CONFIG_FILE))
    except Exception as error:  # from OmegaConf, YAML or the operating system
        raise ConfigurationError(f"{folder / run_folder.CONFIG_FILE} cannot be read: {error}") from error
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def check_resumable(folder: Path) -> None:
    """Check that the run in ``folder`` can be resumed, and remove the summary of its failure.

    Local; the caller must hold the lock of the folder.

    Raises
    ------
    ConfigurationError
        The run has completed, or there is no checkpoint.
    """
    summary = folder / run_folder.SUMMARY_FILE
    try:
        if json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed":
            raise ConfigurationError(f"the run in {folder} has ended ({summary.name}): there is nothing to resume")
    except (OSError, LookupError, TypeError, json.JSONDecodeError):  # killed before or while it wrote the summary
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
    """Return one line that tells how to resume the run in ``folder``, which has ended prematurely. Local."""
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
    """Return the overrides that the user has set for this run since it was started. Local."""
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

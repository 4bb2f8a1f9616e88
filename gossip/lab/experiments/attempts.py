"""Runs that are started again, by torchrun, SLURM or with ``resume=auto``: which one is it, and what is left of it."""

from __future__ import annotations

import enum
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gossip import CheckpointError
from gossip.checkpoints.checkpoint_folder import find_checkpoints
from gossip.lab.experiments import resuming, run_folder
from gossip.lab.experiments.run_settings import ConfigurationError

AUTO = "auto"
"""What ``resume`` is for the newest run of this configuration, instead of a folder."""

_RESTARTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "SLURM": "SLURM_RESTART_COUNT"}
_NOT_COMPARED = ("resume", "output_root", "trusted_targets")


class State(enum.Enum):
    """What there is to be done in a folder."""

    BEGIN = "there is no run in it"
    BEGIN_AGAIN = "there is one without a checkpoint"
    GO_ON = "there is one with a checkpoint"
    ENDED = "there is one that has ended well"


def restarter(environment: Mapping[str, str] | None = None) -> str | None:
    """Who has started this run again after an attempt that did not end well; None in a first attempt."""
    environment = os.environ if environment is None else environment
    for name, variable in _RESTARTS.items():
        if environment.get(variable, "0").isdecimal() and int(environment.get(variable, "0")) > 0:
            return name
    return None


def identities(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What torchrun and SLURM call this run, the same in all its attempts; empty where nobody restarts it.

    Torchrun's id is the user's word for it, unless it is its default: then its own process stands for it.
    """
    environment = os.environ if environment is None else environment
    found = {}
    if "TORCHELASTIC_RUN_ID" in environment:
        run_id = environment["TORCHELASTIC_RUN_ID"]
        found["torchrun"] = f"{socket.gethostname()} {os.getppid()}" if run_id == "none" else run_id
    if "SLURM_JOB_ID" in environment:
        found["SLURM"] = f"{environment.get('SLURM_CLUSTER_NAME', '')} {environment['SLURM_JOB_ID']}"
    return found


def find(output_root: Path, asked: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Path | None:
    """The folder of the newest run in ``output_root`` that is the one that is asked for; None if there is none. Local.

    Its configuration is the same, but for what may change when a run goes on. If torchrun or SLURM has started this
    process again, the run is theirs; otherwise, or if they have none and ``resume=auto`` is asked for, it is one that
    has ended, or has a checkpoint.
    """
    who, wanted = restarter(environment), _comparable(asked)
    same = [found for found in _newest_first(output_root) if _comparable(_saved_configuration(found)) == wanted]
    if who is not None:
        own = [folder for folder in same if _is_of(folder, who, environment)]
        if own or asked.get("resume") != AUTO:
            return own[0] if own else None
    return next((folder for folder in same if _state_of_run(folder) is not State.BEGIN_AGAIN), None)


def state_of(folder: Path, resume: str | None = AUTO, environment: Mapping[str, str] | None = None) -> State:
    """What there is to be done in ``folder`` where the run in it is to go on. Local.

    Without ``resume=auto`` a run of somebody else's, which a process that was started again finds there, is none.
    """
    if not (folder / run_folder.CONFIG_FILE).is_file():
        return State.BEGIN
    who = restarter(environment)
    if resume != AUTO and who is not None and not _is_of(folder, who, environment):
        return State.BEGIN
    return _state_of_run(folder)


def _state_of_run(folder: Path) -> State:
    if _read_json(folder / run_folder.SUMMARY_FILE).get("status") == "completed":
        return State.ENDED
    try:
        return State.GO_ON if find_checkpoints(folder / resuming.CHECKPOINT_FOLDER) else State.BEGIN_AGAIN
    except CheckpointError:
        return State.BEGIN_AGAIN


def _is_of(folder: Path, who: str, environment: Mapping[str, str] | None) -> bool:
    """Whether the run in ``folder`` is the one that torchrun or SLURM has started this process for."""
    own = identities(environment).get(who)
    return own is not None and _read_json(folder / run_folder.STARTED_BY_FILE).get(who) == own


def _newest_first(output_root: Path) -> Iterator[Path]:
    begun = []
    for path in output_root.glob(f"*/{run_folder.VERSIONS_FILE}"):
        try:
            begun.append((path.stat().st_mtime_ns, path.parent))
        except OSError:  # removed meanwhile
            continue
    for _, folder in sorted(begun, reverse=True):
        yield folder


def _saved_configuration(folder: Path) -> Mapping[str, Any]:
    try:
        return resuming.saved_configuration(folder)
    except ConfigurationError:
        return {}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration makes it another run."""
    left_out = (*_NOT_COMPARED, *resuming.MAY_CHANGE)
    return {key: value for key, value in config.items() if key not in left_out}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

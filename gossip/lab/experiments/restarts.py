"""Restarted runs (by torchrun, SLURM or ``resume=auto``): identify the earlier attempt and what it left behind."""

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
from gossip.lab.experiments.validated_models import ConfigurationError

AUTO = "auto"
"""The value of ``resume`` that selects the newest run of the same configuration instead of a given folder."""

_RESTARTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "SLURM": "SLURM_RESTART_COUNT"}
_NOT_COMPARED = ("resume", "output_root", "trusted_targets")


class State(enum.Enum):
    """The state of a run folder, which decides how a restarted run proceeds."""

    BEGIN = "there is no run in it"
    BEGIN_AGAIN = "there is one without a checkpoint"
    GO_ON = "there is one with a checkpoint"
    ENDED = "there is one that has ended well"


def restarter(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the launcher ("torchrun" or "SLURM") that restarted this run after a failed attempt.

    None in a first attempt.
    """
    environment = os.environ if environment is None else environment
    for name, variable in _RESTARTS.items():
        if environment.get(variable, "0").isdecimal() and int(environment.get(variable, "0")) > 0:
            return name
    return None


def identities(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the identifiers that torchrun and SLURM give this run, stable over all its attempts.

    Empty where no launcher restarts the run. For torchrun this is the run id that the user chose (``--rdzv-id``);
    with the default id, host name and process id of torchrun identify the run instead.
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
    """Return the folder of the newest matching run in ``output_root``; None if there is none. Local.

    A run matches if its configuration equals ``asked`` in every key that must not change when a run is resumed. If
    torchrun or SLURM has restarted this process, only a run that was started by the same launcher under the same
    identifier is found. Otherwise, or if the launcher has no such run and ``resume=auto`` is set, the newest matching
    run that has completed or has a checkpoint is found.
    """
    who, wanted = restarter(environment), _comparable(asked)
    same = [found for found in _newest_first(output_root) if _comparable(_saved_configuration(found)) == wanted]
    if who is not None:
        own = [folder for folder in same if _is_of(folder, who, environment)]
        if own or asked.get("resume") != AUTO:
            return own[0] if own else None
    return next((folder for folder in same if _state_of_run(folder) is not State.BEGIN_AGAIN), None)


def state_of(folder: Path, resume: str | None = AUTO, environment: Mapping[str, str] | None = None) -> State:
    """Return the state of ``folder`` for a run that is to be resumed in it. Local.

    In a restarted process without ``resume=auto``, a run that another launcher or job started counts as no run.
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
    """Whether torchrun or SLURM has started this process as another attempt at the run in ``folder``."""
    own = identities(environment).get(who)
    return own is not None and _read_json(folder / run_folder.STARTED_BY_FILE).get(who) == own


def _newest_first(output_root: Path) -> Iterator[Path]:
    begun = []
    for path in output_root.glob(f"*/{run_folder.VERSIONS_FILE}"):
        try:
            begun.append((path.stat().st_mtime_ns, path.parent))
        except OSError:  # the folder was removed in the meantime
            continue
    for _, folder in sorted(begun, reverse=True):
        yield folder


def _saved_configuration(folder: Path) -> Mapping[str, Any]:
    try:
        return resuming.saved_configuration(folder)
    except ConfigurationError:
        return {}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration in which two attempts at the same run must agree."""
    left_out = (*_NOT_COMPARED, *resuming.MAY_CHANGE)
    return {key: value for key, value in config.items() if key not in left_out}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

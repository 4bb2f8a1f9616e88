"""Resuming a run in its own folder: which run that is, the configuration that applies, and whether it can go on.

A run is resumed because the user says so (``resume=``), or because torchrun or SLURM has restarted it.
"""

import enum
import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from gossip import CheckpointError
from gossip.checkpoints.checkpoint_folder import age_key, find_checkpoints
from gossip.communication.training_store import STORE
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.records import cut_jsonl, leaves, record_files
from gossip.lab.experiments.run_folder import read_json
from gossip.lab.experiments.targets import OPTION, check_imports, trusted_names
from gossip.lab.experiments.validated_models import ConfigurationError

AUTO = "auto"
"""The value of ``resume`` that selects the newest run of the same configuration instead of a given folder."""

CHECKPOINT_FOLDER = "checkpoints"
MAY_CHANGE = ("launch", "checkpoint", "profile", "engine", "logger", "logging")
"""Config sections that may change on resume because they do not affect the mathematics.

(The number of ranks does, but it is changed explicitly and deliberately.)
"""

_NOT_COMPARED = (*MAY_CHANGE, "resume", "output_root", "trusted_targets")
_RESTARTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "SLURM": "SLURM_RESTART_COUNT"}
_NOT_SET = object()


class State(enum.Enum):
    """The state of a run folder, which decides how a restarted run proceeds."""

    BEGIN = "there is no run in it"
    BEGIN_AGAIN = "there is one without a checkpoint"
    GO_ON = "there is one with a checkpoint"
    ENDED = "there is one that has ended well"


def restarter(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher ("torchrun" or "SLURM") that restarted this run after an attempt that failed, or None.

    Ranks that meet in a store are restarted one by one, and join the others.
    """
    if STORE in environment:
        return None
    for name, variable in _RESTARTS.items():
        count = environment.get(variable, "0")
        if count.isdecimal() and int(count) > 0:
            return name
    return None


def identities(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the identifiers that torchrun and SLURM give this run, stable over all its attempts.

    Empty where no launcher restarts the run. For torchrun this is the run id that the user chose (``--rdzv-id``);
    with the default id, host name and process id of torchrun identify the run instead.
    """
    found = {}
    if "TORCHELASTIC_RUN_ID" in environment:
        run_id = environment["TORCHELASTIC_RUN_ID"]
        found["torchrun"] = f"{socket.gethostname()} {os.getppid()}" if run_id == "none" else run_id
    if "SLURM_JOB_ID" in environment:
        found["SLURM"] = f"{environment.get('SLURM_CLUSTER_NAME', '')} {environment['SLURM_JOB_ID']}"
    return found


def find(output_root: Path, asked: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the newest matching run in ``output_root``; None if there is none. Local.

    A run matches if its configuration equals ``asked`` in every key that must not change when a run is resumed. If
    torchrun or SLURM has restarted this process, only a run that was started by the same launcher under the same
    identifier is found. Otherwise, or if the launcher has no such run and ``resume=auto`` is set, the newest matching
    run that has completed or has a checkpoint is found.
    """
    begun = []
    for path in output_root.glob(f"*/{run_folder.VERSIONS_FILE}"):
        try:
            if _comparable(saved_configuration(path.parent)) == _comparable(asked):
                begun.append((path.stat().st_mtime_ns, path.parent))
        except (OSError, ConfigurationError):  # it is damaged, or was removed in the meantime
            continue
    newest_first = [folder for _, folder in sorted(begun, reverse=True)]
    if (who := restarter(environment)) is not None:
        own = [folder for folder in newest_first if _is_of(folder, who, environment)]
        if own or asked.get("resume") != AUTO:
            return own[0] if own else None
    return next((folder for folder in newest_first if _state_of_run(folder) is not State.BEGIN_AGAIN), None)


def state_of(folder: Path, resume: str | None = AUTO, environment: Mapping[str, str] = os.environ) -> State:
    """Return the state of ``folder`` for a run that is to be resumed in it. Local.

    In a restarted process without ``resume=auto``, a run that another launcher or job started counts as no run.
    """
    who = restarter(environment)
    is_others = resume != AUTO and who is not None and not _is_of(folder, who, environment)
    if is_others or not (folder / run_folder.CONFIG_FILE).is_file():
        return State.BEGIN
    return _state_of_run(folder)


def folder_to_use(output_root: str, name: str, resume: str | None) -> str:
    """Return the folder of a new run or, with ``resume``, of the run to resume, which must be one."""
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

    ``asked`` is the configuration that the command line would give a new run, ``defaults`` the one without overrides,
    and ``keys`` are the dotted keys and config groups that the command line sets. If it describes a different run, a
    ConfigurationError names every key that differs, with both values.
    """
    config = saved_configuration(folder)
    check_imports(config, asked, str(folder / run_folder.CONFIG_FILE))
    config[OPTION] = list(trusted_names(asked))  # a folder must not declare itself trusted
    saved, now, without = (dict(leaves(tree)) for tree in (config, asked, defaults))
    prefixes = tuple(keys)
    wanted = {
        key
        for key in (*now, *saved)
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
        or (key in now and now[key] != without.get(key, _NOT_SET))  # an experiment file can set keys of any section
    }
    different = sorted(key for key in wanted - {"resume"} if saved.get(key, _NOT_SET) != now.get(key, _NOT_SET))
    if refused := [key for key in different if key.partition(".")[0] not in MAY_CHANGE]:
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
    """Read the configuration with which the run in ``folder`` was started or last resumed. Local."""
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / run_folder.CONFIG_FILE))
    except Exception as error:  # from OmegaConf, YAML or the operating system
        raise ConfigurationError(f"{folder / run_folder.CONFIG_FILE} cannot be read: {error}") from error
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def check_resumable(folder: Path) -> None:
    """Refuse to resume a run that has completed or has no checkpoint, else remove the summary of its failure.

    Local; the caller must hold the lock of the folder.
    """
    summary, state = folder / run_folder.SUMMARY_FILE, _state_of_run(folder)
    if state is State.ENDED:
        raise ConfigurationError(f"the run in {folder} has ended ({summary.name}): there is nothing to resume")
    if state is State.BEGIN_AGAIN:
        raise ConfigurationError(
            f"the run in {folder} has left no checkpoint in {CHECKPOINT_FOLDER}/ to go on from; begin it anew, with "
            "checkpoint.every=... steps"
        )
    summary.unlink(missing_ok=True)
    began, now = read_json(folder / run_folder.VERSIONS_FILE), run_folder.versions()
    if changed := [f"{name} was {began.get(name)} and is {now[name]}" for name in now if began.get(name) != now[name]]:
        logger.warning("not bit for bit what it would have been: {}", ", ".join(changed))


def cut_records(folder: Path) -> int:
    """Remove the records of the steps that will be made again, of all ranks; return the first of these steps. Local.

    The caller must hold the lock of the folder. A rank writes records only once all ranks have loaded the checkpoint.
    """
    step = _newest_step(folder)
    for path in record_files(folder):
        cut_jsonl(path, step)
    return step


def advice(folder: Path, config: Mapping[str, Any]) -> str:
    """Return one line that tells how to resume the run in ``folder``, which has ended prematurely. Local."""
    if not _checkpoints(folder):
        is_ddp = config.get("method") == "ddp"
        why = ": method=ddp saves none" if is_ddp else "; checkpoint.every=N saves one every N steps"
        return f"there is no checkpoint to go on from{why}"
    where = folder.resolve()
    shown = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
    again = [f" {name}=[{','.join(config[name])}]" for name in ("imports", OPTION) if config.get(name)]
    return f"go on from step {_newest_step(folder)} with resume={shown}{''.join(again)}"


def _state_of_run(folder: Path) -> State:
    if read_json(folder / run_folder.SUMMARY_FILE).get("status") == "completed":
        return State.ENDED
    return State.GO_ON if _checkpoints(folder) else State.BEGIN_AGAIN


def _checkpoints(folder: Path) -> list[str]:
    """Return the names of the checkpoints of a run, newest first."""
    try:
        return find_checkpoints(folder / CHECKPOINT_FOLDER)
    except CheckpointError:
        return []


def _newest_step(folder: Path) -> int:
    return age_key(_checkpoints(folder)[0])[0]


def _is_of(folder: Path, who: str, environment: Mapping[str, str]) -> bool:
    """Whether torchrun or SLURM has started this process as another attempt at the run in ``folder``."""
    own = identities(environment).get(who)
    return own is not None and read_json(folder / run_folder.STARTED_BY_FILE).get(who) == own


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration in which two attempts at the same run must agree."""
    return {key: value for key, value in config.items() if key not in _NOT_COMPARED}


def _text(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], default=str) if key in leaves else "not set"

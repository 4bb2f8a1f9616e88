"""The folder of a run: locked while the run is in progress, claimed by one run only, filled by the launching side."""

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.compression.compiled_passes import quantized_by
from gossip.lab.experiments import records
from gossip.lab.experiments.validated_models import ConfigurationError

CONFIG_FILE = "config.yaml"
OVERRIDES_FILE = "overrides.yaml"
SUMMARY_FILE = "summary.json"
VERSIONS_FILE = "versions.json"
STARTED_BY_FILE = "started_by.json"
LOCK_FILE = "run.lock"
_PACKAGES = (
    "gossip-training", "torch", "numpy", "networkx", "loguru", "hydra-core", "omegaconf", "scikit-learn", "safetensors",
    "matplotlib",
)  # fmt: skip
_HYDRAS_NOTES = "multirun.yaml"  # written by hydra for a sweep, before its first run
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_made: list[Path] = []  # folders created by this command, deepest first: hydra creates them before anything is checked


class FolderError(ConfigurationError):
    """The run folder holds another run, is in use by one, or cannot be written."""


def new_name() -> str:
    """Return a unique run name: the time and, for runs that start in the same second, the process id."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}"


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``folder``, which is created if necessary, for the duration of the block. Local.

    The lock is a kernel lock (``flock``) on a file that names this process. The kernel releases it when its owner
    ends, however that happens; a lock file left behind by a killed run locks nothing. No other process inherits the
    lock, because the workers of ``launch`` are spawned. A FolderError names the run in progress that holds it, or says
    that the folder cannot be written.
    """
    path = folder / LOCK_FILE
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = _open_locked(path)
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started_at": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(file, 0)
        os.write(file, json.dumps(owner).encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # the user may have removed the folder
            path.unlink()  # while still locked: a process that has opened the file notices the removal and reopens it
        os.close(file)


def _open_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BlockingIOError:
            os.close(file)
            owner = {"pid": "?", "host": "?", "started_at": "?"} | read_json(path)
            raise FolderError(
                f"{path.parent} is in use by the run with process id {owner['pid']} on {owner['host']}, started at "
                f"{owner['started_at']}; wait for it, or choose another folder with hydra.run.dir=..."
            ) from None
        except OSError as error:
            if error.errno in _CANNOT_LOCK:
                logger.warning("{} is on a file system without locks: nothing keeps another run out of it", path.parent)
                return file
            os.close(file)
            raise
        os.close(file)  # its owner removed it in the meantime


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"the run folder {folder} cannot be written: {error.strerror}") from error


def claim(folder: Path, config: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Claim ``folder`` for this run: write the resolved configuration, the user's overrides and the versions.

    A FolderError says that the folder already holds a run, or cannot be written.
    """
    from omegaconf import OmegaConf

    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / CONFIG_FILE).open("x", encoding="utf-8") as file:
                file.write(OmegaConf.to_yaml(OmegaConf.create(dict(config))))
        except FileExistsError:
            raise FolderError(
                f"{folder} already holds a run ({CONFIG_FILE}); remove it, or choose another folder with "
                "hydra.run.dir=..."
            ) from None
        (folder / OVERRIDES_FILE).write_text(OmegaConf.to_yaml(list(overrides)), encoding="utf-8")
        write_json(folder / VERSIONS_FILE, versions())


def clear(folder: Path) -> None:
    """Remove the files of a run that left no checkpoint, so that :func:`claim` can begin it again.

    The caller must hold the lock.
    """
    for path in (folder / CONFIG_FILE, folder / SUMMARY_FILE, *records.record_files(folder)):
        path.unlink(missing_ok=True)


def unclaim(folder: Path) -> None:
    """Remove the files that were written for a run that was refused before it began.

    The caller must hold the lock.
    """
    for name in (CONFIG_FILE, OVERRIDES_FILE, VERSIONS_FILE, STARTED_BY_FILE):
        (folder / name).unlink(missing_ok=True)


def update_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Atomically write the configuration with which a run is resumed."""
    from omegaconf import OmegaConf

    _replace(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def read_overrides(folder: Path) -> list[str]:
    """Read the overrides that the user set; empty if they were not recorded."""
    from omegaconf import OmegaConf

    path = folder / OVERRIDES_FILE
    overrides: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.exists() else []  # interpolations unresolved
    return list(map(str, overrides))


def write_failure(folder: Path, summary: Mapping[str, Any]) -> bool:
    """Write the summary of a failed run, and return whether this rank is the first: its failure is the cause."""
    try:
        with (folder / SUMMARY_FILE).open("x", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)
    except FileExistsError:
        return False
    return True


def read_summary(folder: Path, overrides: Sequence[str] = (), problem: str = "") -> dict[str, Any]:
    """Read the summary of a run; if it has left none, return one that says why: the ``problem`` with its beginning."""
    reason = problem or f"its process ended without leaving {SUMMARY_FILE}"
    return {"status": "failed", "reason": reason, "overrides": list(overrides), **read_json(folder / SUMMARY_FILE)}


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages on which results depend."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["int8 and int4 by"] = quantized_by()
    return versions


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; empty if there is none, or not all of it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically write an object, with null for every number that is not finite."""
    _replace(path, json.dumps(records.without_non_finite(content), indent=2, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def remove_new() -> None:
    """Remove the folders that hydra created for this command and that hold nothing but hydra's own notes. Local."""
    if _made and _made[0].is_dir() and [path.name for path in _made[0].iterdir()] == [_HYDRAS_NOTES]:
        (_made[0] / _HYDRAS_NOTES).unlink()
    for path in _made:
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()
    _made.clear()


def note_new(place: Any) -> None:
    """Note which folders hydra is about to create for a section ``hydra.run`` or ``hydra.sweep``. Local."""
    _made.clear()
    with contextlib.suppress(Exception):  # hydra itself reports a path that cannot be resolved
        folder = Path(str(place.dir)).absolute()
        _made.extend(path for path in (folder, *folder.parents) if not path.exists())

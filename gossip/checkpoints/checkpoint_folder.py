"""What lies where in a folder of checkpoints, and which of it is complete.

    folder/step_0000000100/rank0.pt, rank1.pt, ..., manifest.json
    folder/.step_0000000200.partial/                               being written, or being removed

A checkpoint is written in its partial folder, the manifest last, and gets its name by one rename: under that name it is
complete or was damaged later. One that is to be replaced by another of the same step is called ``step_....replaced``
between two renames, and counts as that step's until the new one is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.checkpoints.checkpoint_files import FileRecord, reason, sync_folder, write_file
from gossip.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "gossip checkpoint"
FORMAT_VERSION = 2
_STEP = re.compile(r"step_(\d{10,})(\.replaced)?")
_PARTIAL = re.compile(r"\.step_\d{10,}(\.replaced)?\.partial")
_OURS = re.compile(r"rank\d+\.pt|manifest\.json")
_FIELDS: Mapping[str, type] = {
    "step": int,
    "world_size": int,
    "files": dict,
    "module": dict,
    "optimizers": dict,
    "buckets": list,
    "topology": str,
}


def rank_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank{rank}.pt"


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of ``step``."""
    return folder / f"step_{step:010d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written."""
    return folder / f".step_{step:010d}.partial"


def is_step_folder(path: Path) -> bool:
    """Whether ``path`` is meant as one checkpoint, and not as a folder of them."""
    return _STEP.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def find_checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints, complete or not, the newest first."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(filter(_STEP.fullmatch, names), key=age_key, reverse=True)


def age_key(name: str) -> tuple[int, bool]:
    """Sorts names of checkpoints from the oldest to the newest."""
    found = _STEP.fullmatch(name)
    assert found is not None
    return int(found[1]), found[2] is None


# ---------------------------------------------------------------------- manifests


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write what makes a checkpoint complete; ``content`` is plain, see ``_FIELDS``."""
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **content}
    text = json.dumps(body | {"manifest_sha256": _digest(body)}, indent=1)
    write_file(checkpoint / MANIFEST, lambda file: file.write(text.encode()))


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's manifest, verified.

    Raises
    ------
    CheckpointError
        There is none, or it is damaged, foreign or of another format version.
    """
    path = checkpoint / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a complete checkpoint: it has no manifest.json" if checkpoint.is_dir() else "does not exist"
        raise CheckpointError(f"{checkpoint} {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {reason(error)[:200]}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a {FORMAT}")
    if body.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {body.get('format_version')!r}, but this gossip reads {FORMAT_VERSION}; load "
            f"it with gossip {body.get('gossip', 'of another version')}"
        )
    if body.pop("manifest_sha256", None) != _digest(body):
        raise CheckpointError(f"{path} is damaged: its own hash differs")
    for field, kind in _FIELDS.items():
        if type(body.get(field)) is not kind:
            raise CheckpointError(f"{path} is damaged: {field!r} is no {kind.__name__}")
    records(body, path)
    return body


def records(manifest: Mapping[str, Any], path: Path | str = MANIFEST) -> list[FileRecord]:
    """What the ranks' files must be, by rank."""
    found = []
    for rank in range(manifest["world_size"]):
        entry = manifest["files"].get(rank_file(rank))
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or type(entry.get("sha256")) is not str:
            raise CheckpointError(f"{path} is damaged: it does not describe {rank_file(rank)}")
        found.append(FileRecord(entry["size"], entry["sha256"]))
    if not found:
        raise CheckpointError(f"{path} is damaged: world_size is {manifest['world_size']}")
    return found


def check_sizes(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Raise if a rank's file is missing or has another size than the manifest says; a look at the folder only."""
    for rank, record in enumerate(records(manifest)):
        path = checkpoint / rank_file(rank)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if size != record.size:
            raise CheckpointError(f"{path} has {size} bytes instead of {record.size}: it was truncated or replaced")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- writing; by rank 0 alone, under the lock


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let nobody else save into ``folder`` meanwhile; the lock goes with its owner.

    Raises
    ------
    CheckpointError
        Another run is saving there now.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run is saving into {folder} now; give every run a folder of its own"
            ) from None
        except OSError as error:
            logger.debug("{} cannot be locked: {}", folder, error.strerror)  # not every file system knows locks
        yield
    finally:
        os.close(descriptor)


def begin(folder: Path, step: int) -> None:
    """Remove what dead runs left and make the partial folder of ``step``."""
    final = step_folder(folder, step)
    if final.exists() and not _is_ours(final):
        raise CheckpointError(f"{final} exists and holds files that are no checkpoint's; move it away")
    for entry in list(os.scandir(folder)):
        if _PARTIAL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                _delete(folder / entry.name)
    partial_folder(folder, step).mkdir()


def abandon(folder: Path, step: int) -> None:
    """Remove the partial folder of ``step``."""
    with contextlib.suppress(OSError):
        _delete(partial_folder(folder, step))


def commit(folder: Path, step: int, manifest: Mapping[str, Any]) -> None:
    """Complete the partial folder and give it its name."""
    partial, final = partial_folder(folder, step), step_folder(folder, step)
    try:
        check_sizes(partial, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the folder must be one that all ranks share") from error
    write_manifest(partial, manifest)
    sync_folder(partial)
    aside = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if aside.exists():
            _remove(aside)
        os.replace(final, aside)
    try:
        os.replace(partial, final)
    except OSError:
        if aside.exists():
            os.replace(aside, final)
        raise
    sync_folder(folder)


def prune(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to ``step`` keep the newest ``keep`` that are complete; whatever else is there stays."""
    names = find_checkpoints(folder)
    later = [name for name in names if age_key(name) > (step, True)]
    if later:
        logger.warning(
            "{} holds checkpoints of later steps, of another run perhaps: load takes {} before step {}",
            folder,
            later[0],
            step,
        )
    num_kept = 0
    for name in names[len(later) :]:
        replaced = age_key(name) == (step, False)
        if num_kept < keep and not replaced:
            num_kept += _is_complete(folder / name)
        elif _is_ours(folder / name):
            _remove(folder / name)


def _is_complete(checkpoint: Path) -> bool:
    try:
        check_sizes(checkpoint, read_manifest(checkpoint))
    except CheckpointError:
        return False
    return True


def _is_ours(checkpoint: Path) -> bool:
    return not checkpoint.is_symlink() and all(_OURS.fullmatch(name) for name in os.listdir(checkpoint))


def _remove(checkpoint: Path) -> None:
    """Under its own name a checkpoint is complete until it is gone."""
    partial = checkpoint.with_name(f".{checkpoint.name}.partial")
    os.replace(checkpoint, partial)
    _delete(partial)


def _delete(partial: Path) -> None:
    for name in os.listdir(partial):
        if _OURS.fullmatch(name):
            os.unlink(partial / name)
    partial.rmdir()

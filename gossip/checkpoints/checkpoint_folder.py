"""The layout of a folder of checkpoints, and which of its checkpoints are complete.

    folder/step_0000000100/rank0.pt, rank1.pt, ..., manifest.json
    folder/.step_0000000200.partial/                               being written or removed

A checkpoint is written in its partial folder, the manifest last, and then gets its name by a single rename: under that
name it is complete, unless it was damaged later. A checkpoint that another one of the same step replaces is called
``step_....replaced`` between two renames, and counts as the checkpoint of that step until the new one is in place.
"""

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

from gossip.checkpoints.checkpoint_files import FileRecord, sync_folder, write_file
from gossip.errors import CheckpointError, reason

MANIFEST = "manifest.json"
FORMAT = "gossip checkpoint"
FORMAT_VERSION = 2
_STEP = re.compile(r"step_(\d{10,})(\.replaced)?")
_PARTIAL = re.compile(r"\.step_\d{10,}(\.replaced)?\.partial")
_OURS = re.compile(r"rank\d+\.pt|manifest\.json|process\d+\.json(\.partial)?")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rank{rank}.pt"


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``."""
    return folder / f"step_{step:010d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Return the path at which the checkpoint of ``step`` is written."""
    return folder / f".step_{step:010d}.partial"


def is_step_folder(path: Path) -> bool:
    """Return whether ``path`` denotes one checkpoint rather than a folder of them."""
    return _STEP.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def find_checkpoints(folder: Path) -> list[str]:
    """Return the names of the checkpoints, complete or not, the newest first."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(filter(_STEP.fullmatch, names), key=age_key, reverse=True)


def age_key(name: str) -> tuple[int, bool]:
    """Return a key that sorts names of checkpoints from the oldest to the newest."""
    found = _STEP.fullmatch(name)
    assert found is not None
    return int(found[1]), found[2] is None


# ---------------------------------------------------------------------- manifests


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, which completes a checkpoint; ``content`` is plain data."""
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **content}
    text = json.dumps(body | {"manifest_sha256": digest_of(body)}, indent=1)
    write_file(checkpoint / MANIFEST, lambda file: file.write(text.encode()))


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, verified.

    Raises CheckpointError: there is no manifest, or it is damaged, of another program or of another format version.
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
    if body.pop("manifest_sha256", None) != digest_of(body):
        raise CheckpointError(f"{path} is damaged: its hash does not match its contents")
    manifest: dict[str, Any] = body
    return manifest


def records(manifest: Mapping[str, Any]) -> list[FileRecord]:
    """Return the records of the ranks' files, by rank."""
    return [FileRecord(**manifest["files"][rank_file(rank)]) for rank in range(manifest["world_size"])]


def check_sizes(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Raise if a rank's file is missing or differs in size from the manifest; reads only file sizes."""
    for rank, record in enumerate(records(manifest)):
        path = checkpoint / rank_file(rank)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if size != record.size:
            raise CheckpointError(f"{path} has {size} bytes instead of {record.size}: it was truncated or replaced")


def digest_of(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 hash of plain data."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- writing; by rank 0 only, holding the lock


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Prevent other runs from saving into ``folder`` within the block; the lock ends with its process.

    Raises CheckpointError: another run is saving there at the moment.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run is currently saving into {folder}; give every run a folder of its own"
            ) from None
        except OSError as error:
            logger.debug("{} cannot be locked: {}", folder, error.strerror)  # not every file system supports locks
        yield
    finally:
        os.close(descriptor)


def begin(folder: Path, step: int) -> None:
    """Remove what interrupted runs left behind, and create the partial folder of ``step``."""
    final = step_folder(folder, step)
    if final.exists() and not _is_ours(final):
        raise CheckpointError(f"{final} exists and holds files that do not belong to a checkpoint; move it away")
    for entry in list(os.scandir(folder)):
        if _PARTIAL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                _delete(folder / entry.name)
    partial_folder(folder, step).mkdir()


def write_note(partial: Path, process: int, note: Mapping[str, Any]) -> None:
    """Note in the partial folder what a process has written, or why it has not."""
    path = _note(partial, process)
    unfinished = path.with_name(f"{path.name}.partial")
    write_file(unfinished, lambda file: file.write(json.dumps(note).encode()))
    os.replace(unfinished, path)


def read_note(partial: Path, process: int) -> dict[str, Any] | None:
    """Return the note of a process; None if there is none yet."""
    try:
        note: dict[str, Any] = json.loads(_note(partial, process).read_text())
    except FileNotFoundError:
        return None
    return note


def remove_notes(partial: Path, num_processes: int) -> None:
    """Remove the notes, when all have been read."""
    for process in range(num_processes):
        _note(partial, process).unlink()


def num_bytes(partial: Path) -> int:
    """Return how much has been written into the partial folder."""
    size = 0
    for entry in os.scandir(partial):
        with contextlib.suppress(FileNotFoundError):  # a note that has got its name meanwhile
            size += entry.stat().st_size
    return size


def _note(partial: Path, process: int) -> Path:
    return partial / f"process{process}.json"


def abandon(folder: Path, step: int) -> None:
    """Remove the partial folder of ``step``."""
    with contextlib.suppress(OSError):
        _delete(partial_folder(folder, step))


def commit(folder: Path, step: int, manifest: Mapping[str, Any]) -> None:
    """Complete the partial folder and rename it to its final name."""
    partial, final = partial_folder(folder, step), step_folder(folder, step)
    try:
        check_sizes(partial, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; all ranks must share the folder") from error
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
    """Keep the newest ``keep`` complete checkpoints up to ``step``, and everything that is not a checkpoint of ours."""
    names = find_checkpoints(folder)
    later = [name for name in names if age_key(name) > (step, True)]
    if later:
        logger.warning(
            "{} holds checkpoints of later steps, perhaps of another run: load prefers {} to step {}",
            folder,
            later[0],
            step,
        )
    num_kept = 0
    for name in names[len(later) :]:
        replaced = age_key(name) == (step, False)
        if num_kept < keep and not replaced:
            with contextlib.suppress(CheckpointError):  # one that is not complete does not count
                check_sizes(folder / name, read_manifest(folder / name))
                num_kept += 1
        elif _is_ours(folder / name):
            _remove(folder / name)


def _is_ours(checkpoint: Path) -> bool:
    return not checkpoint.is_symlink() and all(_OURS.fullmatch(name) for name in os.listdir(checkpoint))


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. Under its own name it stays complete until it is gone."""
    partial = checkpoint.with_name(f".{checkpoint.name}.partial")
    os.replace(checkpoint, partial)
    _delete(partial)


def _delete(partial: Path) -> None:
    for name in os.listdir(partial):
        if _OURS.fullmatch(name):
            os.unlink(partial / name)
    partial.rmdir()

"""Save what every rank needs to go on exactly where it stands."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from gossip.checkpoints import checkpoint_folder as layout_on_disk
from gossip.checkpoints.all_or_none import compare, together
from gossip.checkpoints.checkpoint_files import reason, sync_folder, write_tensors
from gossip.checkpoints.rank_state import is_stateful, parts_state
from gossip.checkpoints.replicas import Replicas
from gossip.checkpoints.trained_models import TrainedModel, jointly
from gossip.errors import CheckpointError
from gossip.version import __version__


@torch.inference_mode(False)
def save(model: TrainedModel, folder: str | os.PathLike[str], *, keep: int = 2, **parts: Any) -> Path:
    """Write a checkpoint of all ranks into ``folder``. Collective; between any two steps.

    Every rank's file has its parameters and buffers (under the bare module's names), optimizer, messages in flight
    (awaited, not applied) and random number generators (torch, CUDA, Python, NumPy). Training goes on bit for bit as if
    nothing had been saved, and a run that :func:`gossip.load` resumes does too. Virtual workers write the files of all
    their ranks, so that a run may begin virtually and go on in processes, and back.

    Parameters
    ----------
    model : GossipDataParallel or VirtualWorkers
    folder : path
        Shared by all ranks; made if it does not exist. The checkpoint is ``folder/step_0000000123``.
    keep : int
        How many complete checkpoints stay; older ones are removed once the new one is complete. (Complete by their
        manifest and sizes: old files are not read again.) Checkpoints of later steps and all other files stay.
    **parts
        What else belongs to the run, by name: objects with ``state_dict()`` and ``load_state_dict()`` (scheduler,
        GradScaler, sampler), or plain data (numbers, strings, tensors, lists, dicts: the position in the data).

    Returns
    -------
    Path
        Of the checkpoint.

    Raises
    ------
    TypeError, ValueError
        An argument, or something in a part's state, cannot be saved; nothing has been written.
    CheckpointError
        Some rank could not write (disk full, no permission), or the ranks are at different steps; raised on every rank,
        with rank, path and reason. What was saved before is intact, and training can go on.
    ExchangeError
        A rank did not take part within the model's ``timeout``.

    Notes
    -----
    Between two steps and outside ``averaged()``. A checkpoint is written under another name (``.step_....partial``),
    hashed meanwhile, brought to the disk, and renamed at the end: one that is not complete does not exist.

    Examples
    --------
    >>> import functools, gossip, torch
    >>> optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    >>> model = gossip.GossipDataParallel(torch.nn.Linear(2, 1), optimizer, "ring")
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> gossip.save(model, "checkpoints", batch=17)
    PosixPath('checkpoints/step_0000000001')
    """
    return jointly(model, lambda replicas: _save(replicas, Path(folder), keep, parts))


def _save(replicas: Replicas, path: Path, keep: int, parts: dict[str, Any]) -> Path:
    replicas.check_between_steps()
    step = replicas.step
    shared = _announce(replicas, path, keep, parts)
    replicas.settle()
    with ExitStack() as lock:
        together(replicas, f"preparing to save into {path}", lambda: _prepare(replicas, path, lock))
        try:
            files = together(replicas, f"saving step {step}", lambda: _write_ranks(replicas, path, shared))
            together(replicas, f"completing the checkpoint of step {step}", lambda: _complete(replicas, path, files))
        except Exception:
            if replicas.process == 0:
                layout_on_disk.abandon(path, step)
            raise
        if replicas.process == 0:
            _prune(path, step, keep)
    return layout_on_disk.step_folder(path, step)


def _announce(replicas: Replicas, path: Path, keep: int, parts: dict[str, Any]) -> dict[str, Any]:
    """Check everything that can be checked before anything is written, here and between the processes.

    Returns the sections that are the same for all ranks here: the parts.
    """
    shared: dict[str, Any] = {}

    def check() -> dict[str, Any]:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be a whole number of checkpoints, at least 1, got {keep!r}")
        shared.update(parts_state(parts))
        replicas.check_savable()
        return {
            "step": replicas.step,
            "folder": os.path.abspath(path),
            "parts": [f"{name} ({'stateful' if is_stateful(part) else 'data'})" for name, part in parts.items()],
        }

    announced = together(replicas, f"gossip.save at step {replicas.step}", check)
    for rank, described in enumerate(announced):
        for what, value in described.items():
            if value != announced[0][what]:
                raise CheckpointError(
                    f"the ranks do not save the same thing: {what} is {announced[0][what]} on rank 0, but {value} on "
                    f"rank {rank}; call gossip.save on every rank after the same number of steps, with the same "
                    "arguments"
                )
    description = replicas.describe()
    entries = description["module"] | description["optimizers"]
    entries |= {f"bucket {index}": text for index, text in enumerate(description["buckets"])}
    compare(replicas, entries, "comparing what is saved")
    return shared


def _prepare(replicas: Replicas, path: Path, lock: ExitStack) -> None:
    if replicas.process == 0:
        path.mkdir(parents=True, exist_ok=True)
        lock.enter_context(layout_on_disk.locked(path))
        layout_on_disk.begin(path, replicas.step)


def _write_ranks(replicas: Replicas, path: Path, shared: dict[str, Any]) -> dict[str, Any]:
    partial = layout_on_disk.partial_folder(path, replicas.step)
    files = {}
    for rank, state in zip(replicas.ranks, replicas.states(), strict=True):
        name = layout_on_disk.rank_file(rank)
        files[name] = dataclasses.asdict(write_tensors(partial / name, state | shared))
    sync_folder(partial)
    return files


def _complete(replicas: Replicas, path: Path, files: Sequence[dict[str, Any]]) -> None:
    if replicas.process == 0:
        manifest = {
            "gossip": __version__,
            "torch": torch.__version__,
            "step": replicas.step,
            "world_size": replicas.world_size,
            "num_processes": replicas.num_processes,
            "num_shards": replicas.num_shards,
            **replicas.describe(),
            "files": {name: record for of_process in files for name, record in of_process.items()},
        }
        layout_on_disk.commit(path, replicas.step, manifest)


def _prune(path: Path, step: int, keep: int) -> None:
    """The new checkpoint is complete: what goes wrong from here on is worth a warning only."""
    try:
        layout_on_disk.prune(path, step, keep)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints could not be removed: {}", reason(error))

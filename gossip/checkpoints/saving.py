"""Save everything that the ranks need in order to continue exactly."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from gossip.checkpoints import checkpoint_folder as layout_on_disk
from gossip.checkpoints.checkpoint_files import sync_folder, write_tensors
from gossip.checkpoints.replicas import Replicas, compare, raise_on_all_ranks, run_on_all_ranks
from gossip.checkpoints.trained_models import TrainedModel, collectively
from gossip.communication.host import daemon_threads
from gossip.communication.host.available_memory import available_bytes, size_text
from gossip.communication.liveness.process_liveness import own_process
from gossip.errors import CheckpointError, reason
from gossip.parameters.serializable_state import copied, state_of, to_serializable
from gossip.private_torch import tree_leaves
from gossip.step.state.kept_objects import is_stateful
from topologies.validation import check_integer
from topologies.version import __version__

Files = dict[str, dict[str, Any]]
"""The records of files, by name."""
_PAUSE_S = 0.05


@torch.inference_mode(False)
def save(
    model: TrainedModel, folder: str | os.PathLike[str], *, keep: int = 2, background: bool = False, **parts: Any
) -> Path:
    """Write a checkpoint of all ranks into ``folder``. Collective.

    Every rank's file has its parameters, buffers and extra states (under the bare module's names), optimizer, messages
    in flight (awaited, not applied) and random number generators (torch, CUDA, Python, NumPy). Training continues bit
    for bit as if nothing had been saved, and so does a run that :func:`gossip.load` resumes. Virtual workers write the
    files of all their ranks, so a run can start virtually and continue in processes, and vice versa.

    Parameters
    ----------
    model : GossipDataParallel or VirtualWorkers
        The model, between any two steps and outside ``averaged()``.
    folder : path
        A folder that all ranks share; created if it does not exist. The checkpoint is ``folder/step_0000000123``.
    keep : int
        The number of complete checkpoints to keep; older ones are removed once the new one is complete. (Completeness
        is judged by manifest and sizes: old files are not read again.) Checkpoints of later steps and all other files
        are kept.
    background : bool
        Whether to write while training continues: the call returns when the state has been copied, into memory for one
        more copy, which is given back piece by piece as it is written. At most one checkpoint is being written: the
        next :func:`gossip.save`, :func:`gossip.load` or ``model.close()``, and the end of the program, wait for it.
    **parts
        Whatever else belongs to the run, by name: plain data (numbers, strings, tensors, lists, dicts), such as the
        position in the data, or objects with ``state_dict()`` and ``load_state_dict()`` that the model does not keep
        (``model.keep(scheduler=scheduler)``; those are saved in any case).

    Returns
    -------
    Path
        The path of the checkpoint; with ``background``, where it will be.

    Raises
    ------
    TypeError, ValueError
        An argument, or something in a part's state, cannot be saved, or a part has the name of an object that the model
        keeps; nothing has been written.
    CheckpointError
        A rank could not write (disk full, no permission), or, with ``background``, a machine has no memory for the
        copies; raised on every rank, with rank, path and reason. What fails in the background is logged at once, and
        raised by the next call that waits for it. Earlier checkpoints are intact, and training can continue.
    ManifestError
        The ranks are at different steps, or do not save the same thing; raised on every rank.
    ExchangeError
        A rank did not take part within the model's ``timeout``.

    Notes
    -----
    A checkpoint is written under another name (``.step_....partial``), hashed while it is written, flushed to disk, and
    renamed at the end, so an incomplete one never appears under its final name.

    Examples
    --------
    >>> import functools, gossip, torch
    >>> optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    >>> model = gossip.GossipDataParallel(torch.nn.Linear(2, 1), optimizer, "ring")
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> gossip.save(model, "checkpoints", batch=17)
    PosixPath('checkpoints/step_0000000001')
    """
    begun: list[BackgroundSave] = []

    def operate(replicas: Replicas) -> Path:
        while begun:  # the remaining ranks repeat it without one that was lost
            begun.pop().cancel()
            replicas.kept.wait_for_written = None
        return _save(replicas, Path(folder), keep, parts, begun if background else None)

    return collectively(model, operate)


def _save(
    replicas: Replicas, path: Path, keep: int, parts: dict[str, Any], in_background: list[BackgroundSave] | None
) -> Path:
    replicas.check_between_steps()
    step = replicas.step
    shared = _announce(replicas, path, keep, parts)
    replicas.settle()
    is_first = replicas.process == 0

    def prepare() -> None:
        if is_first:
            path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(layout_on_disk.locked(path))
            layout_on_disk.begin(path, step)

    def complete(files: Files) -> None:
        layout_on_disk.commit(path, step, {**manifest, "files": files})
        replicas.kept.newest_saved = step
        try:
            layout_on_disk.prune(path, step, keep)
        except (OSError, CheckpointError) as error:  # the new one is complete
            logger.warning("old checkpoints could not be removed: {}", reason(error))

    with ExitStack() as lock:
        run_on_all_ranks(replicas, f"preparing to save into {path}", prepare)
        manifest = _manifest(replicas)
        try:
            if in_background is not None:
                states = _copies(replicas, shared)
                save = BackgroundSave(
                    replicas,
                    path,
                    lock=lock.pop_all(),
                    write=lambda: _write_ranks(path, step, states, releases=True),
                    complete=complete,
                )
                in_background.append(save)
                replicas.kept.wait_for_written = save.wait
                return layout_on_disk.step_folder(path, step)
            written = run_on_all_ranks(
                replicas, f"saving step {step}", lambda: _write_ranks(path, step, _states(replicas, shared))
            )
            files = {name: record for of_process in written for name, record in of_process.items()}
            run_on_all_ranks(
                replicas, f"completing the checkpoint of step {step}", lambda: complete(files) if is_first else None
            )
        except Exception:
            if is_first:
                layout_on_disk.abandon(path, step)
            raise
    return layout_on_disk.step_folder(path, step)


def _announce(replicas: Replicas, path: Path, keep: int, parts: dict[str, Any]) -> dict[str, Any]:
    """Check everything that can be checked before writing, here and between the processes.

    Returns the sections that all ranks here have in common: the states of the parts that have one, and plain data.
    """
    shared: dict[str, Any] = {"stateful": {}, "data": {}}
    entries = {"step": str(replicas.step), "folder": os.path.abspath(path)}

    def check() -> None:
        replicas.kept.wait_for_save()
        check_integer("keep", keep, minimum=1)
        for name, part in replicas.kept.with_parts(parts).items():
            if is_stateful(part):
                where = f"{name}.state_dict()"
                shared["stateful"][name] = to_serializable(state_of(part, where), where)
            else:
                shared["data"][name] = to_serializable(part, name)
        replicas.check_savable()

    run_on_all_ranks(replicas, f"gossip.save at step {replicas.step}", check)
    entries["parts"] = str({kind: list(named) for kind, named in shared.items()})
    description = replicas.describe()
    entries |= description["module"] | description["optimizers"]
    entries |= {f"bucket {index}": text for index, text in enumerate(description["buckets"])}
    advice = "; call gossip.save on every rank after the same number of steps, with the same arguments"
    compare(replicas, entries, "comparing what is saved", advice)
    return shared


def _states(replicas: Replicas, shared: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((rank, {**state, **shared}) for rank, state in zip(replicas.ranks, replicas.states(), strict=True))


def _copies(replicas: Replicas, shared: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Copy the states of all ranks here, if there is memory for it on every machine. Collective."""
    what = f"copying the state of step {replicas.step}"

    def measure() -> dict[str, Any]:
        leaves = (leaf for _, state in _states(replicas, shared) for leaf in tree_leaves(state))
        needed = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return {"machine": own_process().machine, "needed": needed, "available": available_bytes()}

    measured = run_on_all_ranks(replicas, what, measure)
    needed = Counter[str]()
    for each in measured:
        needed[each["machine"]] += each["needed"]
    for process, each in enumerate(measured):
        on_machine = needed[each["machine"]]
        if each["available"] is not None and each["available"] < on_machine:
            raise_on_all_ranks(
                replicas,
                CheckpointError(
                    f"{what}: the copies on the machine of rank {process} would take {size_text(on_machine)}, but "
                    f"{size_text(each['available'])} are available; save with background=False"
                ),
            )
    taken: list[tuple[int, dict[str, Any]]] = []
    run_on_all_ranks(
        replicas, what, lambda: taken.extend((rank, copied(state)) for rank, state in _states(replicas, shared))
    )
    return taken


def _write_ranks(
    path: Path, step: int, states: Iterable[tuple[int, dict[str, Any]]], *, releases: bool = False
) -> Files:
    partial = layout_on_disk.partial_folder(path, step)
    files = {}
    for rank, state in states:
        name = layout_on_disk.rank_file(rank)
        files[name] = write_tensors(partial / name, state, releases=releases)._asdict()
    sync_folder(partial)
    return files


def _manifest(replicas: Replicas) -> dict[str, Any]:
    return {
        "gossip": __version__,
        "torch": torch.__version__,
        "step": replicas.step,
        "world_size": replicas.world_size,
        "num_processes": replicas.num_processes,
        "num_shards": replicas.num_shards,
        "group_size": replicas.group_size,
        **replicas.describe(),
    }


class BackgroundSave:
    """The part of one process in a checkpoint that threads write while training continues.

    Each process writes the files of its ranks, and then a note that they are complete, or why they are not. Process 0
    waits for the notes of all, in the folder that they share, and gives the checkpoint its name: threads must not
    communicate over the process group of the training. The model's ``timeout`` is how long process 0 waits for others
    whose files do not grow, and the end of the program for this process.

    Parameters
    ----------
    folder : Path
        The folder of checkpoints.
    lock : ExitStack
        Closed in the end.
    write : callable
        Writes the files of this process, and returns their records.
    complete : callable
        Completes the checkpoint, in process 0, with the records of all files.
    """

    def __init__(
        self,
        replicas: Replicas,
        folder: Path,
        *,
        lock: ExitStack,
        write: Callable[[], Files],
        complete: Callable[[Files], None],
    ) -> None:
        self._folder, self._step = folder, replicas.step
        self._process, self._num_processes = replicas.process, replicas.num_processes
        self._timeout = replicas.timeout
        self._lock, self._write, self._complete = lock, write, complete
        self._is_cancelled = threading.Event()
        self._error: Exception | None = None
        self._thread = daemon_threads.start(
            "gossip-save", self._run, end=lambda: None, failed=self._note_failure, patience=self._timeout
        )

    def wait(self) -> None:
        """Wait until it is complete, in processes other than 0 until its part is; CheckpointError if it has failed."""
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(
                f"the checkpoint of step {self._step}, saved in the background, is not complete: {reason(self._error)}"
            ) from self._error

    def cancel(self) -> None:
        """Give it up, and wait until nothing is written any more."""
        self._is_cancelled.set()
        self._thread.join()

    def _note_failure(self, error: Exception) -> None:
        self._error = error
        logger.error("the checkpoint of step {}, saved in the background, has failed: {}", self._step, reason(error))

    def _run(self) -> None:
        began = time.monotonic()
        partial = layout_on_disk.partial_folder(self._folder, self._step)
        with self._lock:
            try:
                try:
                    files = self._write()
                except Exception as error:
                    with contextlib.suppress(OSError):  # which would say less
                        layout_on_disk.write_note(partial, self._process, {"error": reason(error)})
                    raise
                finally:
                    del self._write  # and the copies
                layout_on_disk.write_note(partial, self._process, {"files": files})
                if self._process == 0:
                    self._complete(self._gather(partial))
                    seconds = time.monotonic() - began
                    logger.info(
                        "the checkpoint of step {} is complete, {:.1f} s after it was begun", self._step, seconds
                    )
            except Exception:
                if self._process == 0:
                    layout_on_disk.abandon(self._folder, self._step)
                raise

    def _gather(self, partial: Path) -> Files:
        """Return the records of all files, once all processes have written theirs."""
        files: Files = {}
        awaited = set(range(self._num_processes))
        deadline, size = 0.0, -1
        while awaited:
            for process in sorted(awaited):
                if (note := layout_on_disk.read_note(partial, process)) is None:
                    continue
                if "error" in note:
                    raise CheckpointError(f"rank {process}: {note['error']}")
                files |= note["files"]
                awaited.discard(process)
            if (now_size := layout_on_disk.num_bytes(partial)) != size:
                size, deadline = now_size, time.monotonic() + self._timeout.total_seconds()
            if time.monotonic() > deadline:
                who = ", ".join(map(str, sorted(awaited)))
                raise CheckpointError(
                    f"rank {who} has written nothing for {self._timeout.total_seconds():g} s, or into another folder; "
                    f"all ranks must share {self._folder}"
                )
            if awaited and self._is_cancelled.wait(_PAUSE_S):
                raise CheckpointError("it was given up")
        layout_on_disk.remove_notes(partial, self._num_processes)
        return files

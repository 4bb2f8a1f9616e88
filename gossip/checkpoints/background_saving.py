"""A checkpoint that threads write while training continues.

Each process writes the files of its ranks, and then a note that they are complete, or why they are not. Process 0 waits
for the notes of all, in the folder that they share, and gives the checkpoint its name: threads must not communicate
over the process group of the training.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.checkpoints import checkpoint_folder as layout_on_disk
from gossip.checkpoints.replicas import Replicas
from gossip.communication.host import daemon_threads
from gossip.errors import CheckpointError, reason

Files = dict[str, dict[str, Any]]
"""The records of files, by name."""
_PAUSE_S = 0.05


class BackgroundSave:
    """The part of one process in such a checkpoint.

    The model's ``timeout`` is how long process 0 waits for others whose files do not grow, and the end of the program
    for this process.

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

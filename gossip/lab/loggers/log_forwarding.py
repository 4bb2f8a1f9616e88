"""Threads that pass the means over the ranks to loggers, during the run and for a bounded time after its end.

They run in the process that manages the run folder: the one that starts the ranks, or rank 0 under torchrun and SLURM.
No training step waits for them, and they do not wait for each other. The means are computed from the files of the ranks
as these grow: records that a logger has not taken yet are on disk anyway, and at most ``AHEAD`` of a rank are held in
memory, however long a logger is unreachable.
"""

import json
import math
import os
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.lab.experiments.records import TOGETHER_FILE, record_files
from gossip.lab.loggers.logger import Beginning, Ending, Logger, flattened
from gossip.lab.loggers.logger_choice import SECTIONS, logging_settings, make_loggers

_BATCH = 256  # maximum number of records between two calls of flush
_PAUSE_S = 0.5  # polling interval for new records
_RETRY_S = 10.0  # delay between a failure and the next attempt

AHEAD = 64
"""The maximum number of records of a rank that are held in memory."""

_STEP = re.compile(rb'\{"step": (\d+)')


class LogForwarder:
    """Passes the records of a run to one logger as they are written.

    The logger is begun once a rank has opened its file. After a failure it is begun again with a delay, from the first
    step that it lacks. Only the first failure is logged, as a warning.
    """

    def __init__(self, name: str, chosen: Logger, beginning: Beginning) -> None:
        self.name = name
        self._logger, self._beginning = chosen, beginning
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self._ending: Ending | None = None
        self._has_warned = False
        self._thread = daemon_threads.start(f"gossip-{name}", self._run, end=self._give_up, failed=self._warn_of)

    def finish(self, ending: Ending | None) -> None:
        """Announce the end of the run, or with None that it never began. Returns immediately."""
        self._ending = ending
        self._is_over.set()

    def wait(self, deadline: float) -> None:
        """Wait until the logger has everything, or until ``deadline`` (in ``time.monotonic()``), and then give up."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("has not taken everything")
        self._give_up()

    def _give_up(self) -> None:
        self._is_given_up.set()
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_given_up.is_set():
            try:
                self._follow()
                return
            except Exception as error:
                self._warn_of(error)
            (self._is_given_up if self._is_over.is_set() else self._is_over).wait(_RETRY_S)

    def _warn_of(self, error: Exception) -> None:
        self._warn(f"has failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            message = "logger={} {}; training is not affected, and its records are in {}"
            logger.warning(message, self.name, what, self._beginning.folder)

    def _follow(self) -> None:
        """Begin the logger, pass on all records until the run has ended, and end the logger."""
        stream: RecordStream | None = None
        while not self._is_given_up.is_set():
            is_over = self._is_over.is_set()  # checked before reading, so that no record can be missed
            if stream is None and record_files(self._beginning.folder):
                stream = RecordStream(self._beginning, self._logger.begin(self._beginning))
            is_whole = self._ending is not None and self._ending.status == "completed"
            found = [] if stream is None else stream.read(_BATCH, is_whole=is_whole)
            for step, values in found:
                self._logger.log(step, values)
            if found:
                self._logger.flush()
            elif is_over:
                break
            else:
                self._is_over.wait(_PAUSE_S)
        if stream is not None and self._ending is not None and not self._is_given_up.is_set():
            self._logger.end(self._ending)


class LogForwarding:
    """The forwarders of a run, one for each selected logger.

    ``folder`` is that of the run, which this process must have locked. The files of all ranks hold the records before
    ``step``, and no later ones.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        settings = logging_settings(config)
        self._wait_s, self._keeps_model = settings.wait_s, settings.model
        num_parts = 2 if folder.name.isdecimal() else 1  # a numbered run of a sweep is called after that, too
        beginning = Beginning(
            folder=folder,
            world_size=config["launch"]["world_size"],
            step=step,
            config={key: value for key, value in config.items() if key not in SECTIONS},
            name=settings.name or "/".join(folder.resolve().parts[-num_parts:]),
            group=settings.group or "",
            tags=tuple(settings.tags),
            wait_s=settings.wait_s,
        )
        self._forwarders = [LogForwarder(name, made, beginning) for name, made in make_loggers(config).items()]

    def __bool__(self) -> bool:
        return bool(self._forwarders)

    def end(self, ending: Ending | None) -> None:
        """Pass the remaining records to the loggers for a bounded time, and end them.

        ``ending`` is None if the ranks could not be started.
        """
        if ending is not None and not self._keeps_model:
            ending = ending._replace(model=None)
        deadline = time.monotonic() + self._wait_s
        for forwarder in self._forwarders:
            forwarder.finish(ending)
        for forwarder in self._forwarders:
            forwarder.wait(deadline)


class RecordStream:
    """The means over the ranks that have a value, and NaN where none has.

    A step is returned once all ranks that trained have written its record. A rank whose record does not arrive is taken
    to be lost if later records of the others report fewer ranks (``num_ranks``); the mean is then that of the others.
    Ranks that lack records of steps before the ``step`` of ``beginning`` are not waited for.
    """

    def __init__(self, beginning: Beginning, first_step: int) -> None:
        self._beginning, self._next_step = beginning, first_step
        self.files: dict[Path, _GrowingFile] = {}

    def read(self, limit: int, *, is_whole: bool) -> list[tuple[int, dict[str, Any]]]:
        """Return at most ``limit`` records that have arrived since the last call, as pairs of a step and its values.

        With ``is_whole`` the files are complete, so that incomplete steps are not waited for.
        """
        for path in record_files(self._beginning.folder):
            self.files.setdefault(path, _GrowingFile(path, self._next_step)).look_ahead()
        found: list[tuple[int, dict[str, Any]]] = []
        while len(found) < limit and (records := self._complete_step(is_whole)):
            step = records[0]["step"]
            self._next_step = step + 1
            found.append((step, _means(records)))
        return found

    def _complete_step(self, is_whole: bool) -> list[dict[str, Any]]:
        """Take and return the records of the next step; none while some of them are still to come."""
        ready = [file for file in self.files.values() if file.has_from(self._next_step)]
        step = min((file.waiting[0]["step"] for file in ready), default=self._next_step)
        having = [file for file in ready if file.waiting[0]["step"] == step]
        world_size = self._beginning.world_size
        trained = (int(record.get("num_ranks", world_size)) for file in ready for record in file.waiting)
        is_complete = (
            is_whole
            or step < self._beginning.step
            or any(file.path.name == TOGETHER_FILE for file in having)
            or len(having) >= min(trained, default=world_size)
        )
        return [file.waiting.popleft() for file in having] if is_complete else []


class _GrowingFile:
    """JSON lines from ``first_step`` on, of which some are waiting in memory."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        self.waiting: deque[dict[str, Any]] = deque()
        self._first_step, self._position = first_step, 0

    def look_ahead(self) -> None:
        """Read until ``AHEAD`` records are waiting or there are no more."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                self._position = 0  # it was cut by a rank that goes on from an older checkpoint
            file.seek(self._position)
            while len(self.waiting) < AHEAD and (line := file.readline()).endswith(b"\n"):
                self._position += len(line)
                step = _STEP.match(line)  # without parsing: a resumed run may have left millions of lines
                if step is not None and int(step[1]) >= self._first_step:
                    self.waiting.append(json.loads(line))

    def has_from(self, step: int) -> bool:
        """Whether a record of this step or a later one is waiting; those that arrived too late are dropped."""
        while True:
            if not self.waiting:
                self.look_ahead()
            if not self.waiting or self.waiting[0]["step"] >= step:
                return bool(self.waiting)
            self.waiting.popleft()


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    flat = [flattened(record) for record in records]
    keys = dict.fromkeys(key for record in flat for key in record if key != "step")
    known = {key: [each[key] for each in flat if not math.isnan(each.get(key, math.nan))] for key in keys}
    return {key: statistics.fmean(values) if values else math.nan for key, values in known.items()}

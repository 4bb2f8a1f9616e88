"""Threads that pass the means over the ranks to loggers, during the run and for a bounded time after its end.

They run in the process that manages the run folder: the one that starts the ranks, or rank 0 under torchrun and SLURM.
No training step waits for them, and they do not wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.lab.experiments.records import record_files
from gossip.lab.loggers.logger import Beginning, Ending, Logger
from gossip.lab.loggers.logger_choice import SECTIONS, logging_settings, make_loggers
from gossip.lab.loggers.record_streams import RecordStream

_BATCH = 256  # maximum number of records between two calls of flush
_PAUSE_S = 0.5  # polling interval for new records
_RETRY_S = 10.0  # delay between a failure and the next attempt


class LogForwarder:
    """Passes the records of a run to one logger as they are written.

    The logger is begun once a rank has opened its file. After a failure it is begun again with a delay, from the first
    step that it lacks. Only the first failure is logged, as a warning.
    """

    def __init__(self, name: str, make: Callable[[], Logger], beginning: Beginning) -> None:
        self.name = name
        self._make, self._beginning = make, beginning
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self._ending: Ending | None = None
        self._logger: Logger | None = None
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
            logger.warning(
                "logger={} {}; training is not affected, and its records are in {}",
                self.name,
                what,
                self._beginning.folder,
            )

    def _follow(self) -> None:
        """Begin the logger, pass on all records until the run has ended, and end the logger."""
        stream: RecordStream | None = None
        while not self._is_given_up.is_set():
            is_over = self._is_over.is_set()  # checked before reading, so that no record can be missed
            if stream is None and record_files(self._beginning.folder):
                self._logger = self._logger or self._make()
                stream = RecordStream(self._beginning, self._logger.begin(self._beginning))
            if stream is None or not self._bring(stream):
                if is_over:
                    break
                self._is_over.wait(_PAUSE_S)
        if stream is not None and self._logger and self._ending is not None and not self._is_given_up.is_set():
            self._logger.end(self._ending)

    def _bring(self, stream: RecordStream) -> int:
        """Pass one batch of records to the logger, and return their number."""
        assert self._logger is not None
        is_whole = self._ending is not None and self._ending.status == "completed"
        found = stream.read(_BATCH, is_whole=is_whole)
        for step, values in found:
            self._logger.log(step, values)
        if found:
            self._logger.flush()
        return len(found)


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
        self._forwarders = [LogForwarder(name, make, beginning) for name, make in make_loggers(config).items()]

    def __bool__(self) -> bool:
        return bool(self._forwarders)

    def end(self, ending: Ending | None) -> None:
        """Pass the remaining records to the loggers for a bounded time, and end them.

        ``ending`` is None if the ranks could not be started.
        """
        if ending is not None and not self._keeps_model:
            ending = replace(ending, model=None)
        deadline = time.monotonic() + self._wait_s
        for forwarder in self._forwarders:
            forwarder.finish(ending)
        for forwarder in self._forwarders:
            forwarder.wait(deadline)

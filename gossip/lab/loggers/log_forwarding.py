"""Threads that pass the records of the ranks to loggers, during the run and for a bounded time after its end.

They run in the process that manages the run folder: the one that starts the ranks, or rank 0 under torchrun and SLURM.
No training step waits for them, and they do not wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.lab.experiments.records import TOGETHER_FILE, record_files
from gossip.lab.loggers.logger import Beginning, Ending, Logger
from gossip.lab.loggers.logger_choice import SECTIONS, logging_settings, make_loggers
from gossip.lab.loggers.record_streams import RecordStream

_BATCH = 256  # maximum number of records between two calls of flush
_PAUSE_S = 0.5  # polling interval for new records
_RETRY_S = 10.0  # delay between a failure and the next attempt


class LogForwarder:
    """Passes the records of a run to one logger, or one logger for each rank, as they are written.

    ``beginning`` is the description of the run that every logger gets, except for ``rank``. The logger is begun once a
    rank has opened its file. After a failure it is begun again with a delay, from the first step that it lacks. Only
    the first failure is logged, as a warning.
    """

    def __init__(self, name: str, make: Callable[[], Logger], beginning: Beginning, *, each_rank: bool) -> None:
        self.name = name
        self._make, self._beginning, self._each_rank = make, beginning, each_rank
        self._folder = beginning.folder
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self._ending: Ending | None = None
        self._loggers: dict[str, Logger] = {}
        self._ended: set[str] = set()
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
                "logger={} {}; training is not affected, and its records are in {}", self.name, what, self._folder
            )

    def _follow(self) -> None:
        """Begin the loggers, pass on all records until the run has ended, and end the loggers."""
        streams: dict[str, RecordStream] = {}
        while not self._is_given_up.is_set():
            is_over = self._is_over.is_set()  # checked before reading, so that no record can be missed
            for beginning in self._beginnings():
                if beginning.records not in streams and beginning.records not in self._ended:
                    made = self._loggers.setdefault(beginning.records, self._make())
                    streams[beginning.records] = RecordStream(beginning, made.begin(beginning))
            if not sum([self._bring(records, stream) for records, stream in streams.items()]):
                if is_over:
                    break
                self._is_over.wait(_PAUSE_S)
        for records in streams:
            if self._ending is not None and not self._is_given_up.is_set():
                self._loggers[records].end(self._ending)
                self._ended.add(records)

    def _beginnings(self) -> Iterator[Beginning]:
        """Yield the description of the run for each logger, for which there are records by now."""
        files = record_files(self._folder)
        if files and not self._each_rank:
            yield self._beginning
        for path in files if self._each_rank else ():
            if path.name != TOGETHER_FILE:
                rank = int(path.stem.removeprefix("rank"))
                yield replace(self._beginning, rank=rank, name=f"{self._beginning.name} rank {rank}")

    def _bring(self, records: str, stream: RecordStream) -> int:
        """Pass one batch of records to a logger, and return their number."""
        is_whole = self._ending is not None and self._ending.status == "completed"
        found = stream.read(_BATCH, is_whole=is_whole)
        for step, values in found:
            self._loggers[records].log(step, values)
        if found:
            self._loggers[records].flush()
        return len(found)


class LogForwarding:
    """The forwarders of a run, one for each selected logger.

    ``folder`` is that of the run, which this process must have locked. The files of all ranks hold the records before
    ``step``, and no later ones.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, step: int) -> None:
        settings = logging_settings(config)
        self._wait_s, self._keeps_model = settings.wait_s, settings.model
        beginning = Beginning(
            folder=folder,
            rank=None,
            world_size=config["launch"]["world_size"],
            step=step,
            config={key: value for key, value in config.items() if key not in SECTIONS},
            name=settings.name or _name_of(folder),
            group=settings.group or "",
            tags=tuple(settings.tags),
            wait_s=settings.wait_s,
        )
        self._forwarders = [
            LogForwarder(name, make, beginning, each_rank=settings.ranks == "each")
            for name, make in make_loggers(config).items()
        ]

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


def _name_of(folder: Path) -> str:
    """Return the name of a run: its folder name, preceded by that of the sweep for numbered runs of a sweep."""
    parts: Sequence[str] = folder.resolve().parts
    return "/".join(parts[-2:]) if folder.name.isdecimal() else parts[-1]

"""Threads that bring loggers what the ranks write, while the run goes on and a little beyond its end.

They are in the process that leaves the run's folder: the one that starts the ranks, or rank 0 under torchrun and SLURM.
No step waits for them, and none of them waits for another.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from gossip.communication import daemon_threads
from gossip.lab.loggers.logger import STATE_FOLDER, Beginning, Ending, Logger
from gossip.lab.loggers.logger_choice import SECTIONS, logging_settings, make_loggers
from gossip.lab.loggers.record_streams import MeanStream, RankStream, Stream

_BEGUN = "begun.json"
_BATCH = 256  # records between two calls of flush
_PAUSE_S = 0.5  # between two looks for new records
_RETRY_S = 10.0  # from a failure to the next attempt


def say_begun(folder: Path, step: int) -> None:
    """Tell followers that the files of all ranks hold the records before ``step``, and none from it on. Local."""
    path = folder / STATE_FOLDER / _BEGUN
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"step": step}), encoding="utf-8")
    partial.replace(path)


class Follower:
    """Brings one logger the records of a run, as they are written.

    Parameters
    ----------
    name : str
        Of the logger.
    make : callable
        Makes one, for the means or for each rank.
    beginning : Beginning
        As all of them get it, but for ``rank`` and ``step``.
    each_rank : bool
        Whether there is a logger for each rank.

    Notes
    -----
    What fails is begun again after a while, from the step that the logger lacks; the first failure is a warning.
    """

    def __init__(self, name: str, make: Callable[[], Logger], beginning: Beginning, *, each_rank: bool) -> None:
        self.name = name
        self._make, self._beginning, self._each_rank = make, beginning, each_rank
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self._ending: Ending | None = None
        self._loggers: dict[str, Logger] = {}
        self._ended: set[str] = set()
        self._has_warned = False
        self._thread = daemon_threads.start(f"gossip-{name}", self._run, end=self._give_up)

    def finish(self, ending: Ending | None) -> None:
        """Say that the run has ended, or with None that it has not begun; return at once."""
        self._ending = ending
        self._is_over.set()

    def wait(self, deadline: float) -> None:
        """Wait until the logger has everything, or until then (``time.monotonic()``); then leave it alone."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("has not taken everything")
        self._give_up()

    def _give_up(self) -> None:
        self._is_given_up.set()
        self._is_over.set()

    def _run(self) -> None:
        step = self._await_beginning()
        while step is not None and not self._is_given_up.is_set():
            try:
                self._follow(step)
                return
            except Exception as error:
                self._warn(f"has failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
            (self._is_given_up if self._is_over.is_set() else self._is_over).wait(_RETRY_S)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "logger={} {}; training is not affected, and its records are in {}", self.name, what, self._folder
            )

    @property
    def _folder(self) -> Path:
        return self._beginning.folder

    def _await_beginning(self) -> int | None:
        """The step with which the ranks have begun; None if they never did."""
        path = self._folder / STATE_FOLDER / _BEGUN
        while not path.exists():
            if self._is_over.wait(_PAUSE_S) and not path.exists():
                return None
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])

    def _follow(self, step: int) -> None:
        """Begin, bring all that there is until the run has ended, and end."""
        streams: dict[str, Stream] = {}
        while not self._is_given_up.is_set():
            is_over = self._is_over.is_set()  # asked before reading: then nothing can come after it
            for beginning in self._beginnings(step):
                if beginning.records not in streams and beginning.records not in self._ended:
                    streams[beginning.records] = self._begin(beginning, step)
            if not sum([self._bring(records, stream) for records, stream in streams.items()]):
                if is_over:
                    break
                self._is_over.wait(_PAUSE_S)
        for records in streams:
            if self._ending is not None and not self._is_given_up.is_set():
                self._loggers[records].end(self._ending)
                self._ended.add(records)

    def _beginnings(self, step: int) -> Iterator[Beginning]:
        """Of all runs for which there are records by now."""
        if not self._each_rank:
            yield replace(self._beginning, step=step)
            return
        for path in sorted(self._folder.glob("rank*.jsonl")):
            rank = int(path.stem.removeprefix("rank"))
            yield replace(self._beginning, step=step, rank=rank, name=f"{self._beginning.name} rank {rank}")

    def _begin(self, beginning: Beginning, step: int) -> Stream:
        made = self._loggers.setdefault(beginning.records, self._make())
        first_step = made.begin(beginning)
        if beginning.rank is not None:
            return RankStream(self._folder / f"{beginning.records}.jsonl", first_step)
        return MeanStream(self._folder, beginning.world_size, first_step, settled_steps=step)

    def _bring(self, records: str, stream: Stream) -> int:
        """Bring some, and return how many."""
        is_whole = self._ending is not None and self._ending.status == "completed"
        found = stream.read(_BATCH, is_whole=is_whole)
        for step, values in found:
            self._loggers[records].log(step, values)
        if found:
            self._loggers[records].flush()
        return len(found)


class Following:
    """The followers of a run: of each chosen logger one.

    Parameters
    ----------
    config : mapping
        Resolved and plain.
    folder : Path
        Of the run, locked by this process.

    Raises
    ------
    ConfigurationError
        A logger cannot be made; nothing has been started.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        settings = logging_settings(config)
        (folder / STATE_FOLDER / _BEGUN).unlink(missing_ok=True)  # a killed attempt's
        self._begun, self._wait_s, self._keeps_model = folder / STATE_FOLDER / _BEGUN, settings.wait_s, settings.model
        beginning = Beginning(
            folder=folder,
            rank=None,
            world_size=config["launch"]["world_size"],
            config={key: value for key, value in config.items() if key not in SECTIONS},
            name=settings.name or _name_of(folder),
            group=settings.group or "",
            tags=tuple(settings.tags),
            wait_s=settings.wait_s,
        )
        each_rank = settings.ranks == "each"
        self._followers = [
            Follower(name, make, beginning, each_rank=each_rank) for name, make in make_loggers(config).items()
        ]

    def __bool__(self) -> bool:
        return bool(self._followers)

    def end(self, ending: Ending | None) -> None:
        """Give the loggers what they lack, for a bounded time; None if the run was refused before it began."""
        if ending is not None and not self._keeps_model:
            ending = replace(ending, model=None)
        deadline = time.monotonic() + self._wait_s
        for follower in self._followers:
            follower.finish(ending)
        for follower in self._followers:
            follower.wait(deadline)
        if self._followers:
            self._begun.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._begun.parent.rmdir()  # where no logger has left anything in it


def _name_of(folder: Path) -> str:
    """The runs of a sweep are numbered in its folder."""
    parts: Sequence[str] = folder.resolve().parts
    return "/".join(parts[-2:]) if folder.name.isdecimal() else parts[-1]

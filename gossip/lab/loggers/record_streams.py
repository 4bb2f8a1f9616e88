"""The means over all ranks of the records of a run in progress, read as its files grow.

Records that a logger has not taken yet remain in these files, which are on disk anyway: at most ``AHEAD`` records of
each rank are held in memory, however long a logger is unreachable.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.records import TOGETHER_FILE, record_files
from gossip.lab.loggers.logger import Beginning, flattened

AHEAD = 64
"""The maximum number of records of a rank that are held in memory."""

_STEP = re.compile(rb'\{"step": (\d+)')


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
    return {key: _mean([record[key] for record in flat if key in record]) for key in keys}


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return statistics.fmean(present) if present else math.nan

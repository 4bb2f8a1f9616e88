"""Streams of the records of a run in progress, read as its files grow: those of one rank, or the means over all ranks.

Records that a logger has not taken yet remain in these files, which are on disk anyway: at most ``AHEAD`` records of
each rank are held in memory, however long a logger is unreachable.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.records import TOGETHER_FILE
from gossip.lab.loggers.logger import flattened

AHEAD = 64
"""The maximum number of records of a rank that are held in memory."""

_STEP = re.compile(rb'\{"step": (\d+)')


class RankStream:
    """The records of one rank from ``first_step`` on, of the JSON lines in ``path``, which need not exist yet."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        self.waiting: deque[dict[str, Any]] = deque()
        self._first_step, self._position = first_step, 0

    def has_next(self) -> bool:
        """Whether a record is waiting in memory or can be read from the file."""
        if not self.waiting:
            self.look_ahead()
        return bool(self.waiting)

    def look_ahead(self) -> None:
        """Read from the file until ``AHEAD`` records are waiting or there are no more."""
        if len(self.waiting) < AHEAD and self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n") or len(self.waiting) == AHEAD:
                        break
                    self._position += len(line)
                    if self._is_wanted(line):
                        self.waiting.append(json.loads(line))

    def read(self, limit: int, *, is_whole: bool) -> list[tuple[int, dict[str, Any]]]:  # noqa: ARG002
        """Return at most ``limit`` records that have arrived since the last call, as pairs of a step and its values.

        With ``is_whole`` the files are complete, so that incomplete steps are not waited for.
        """
        found: list[tuple[int, dict[str, Any]]] = []
        while len(found) < limit and self.has_next():
            record = self.waiting.popleft()
            found.append((record.pop("step"), record))
        return found

    def _is_wanted(self, line: bytes) -> bool:
        """Whether a line is to be returned, without parsing it: a resumed run may have left millions of lines."""
        step = _STEP.match(line)
        return step is not None and int(step[1]) >= self._first_step


class MeanStream:
    """The means over the ranks, from a given step on: over the ranks that have a value, and NaN where none has.

    A step is returned once all ranks that trained have written its record. A rank whose record does not arrive is taken
    to be lost if later records of the others report fewer ranks (``num_ranks``); the mean is then that of the others.

    Parameters
    ----------
    folder : Path
        The folder of the run.
    world_size : int
        The number of ranks, for records that do not state it.
    first_step : int
        The first step to return.
    settled_steps : int
        The number of initial steps whose records are final: ranks that lack them are not waited for.
    """

    def __init__(self, folder: Path, world_size: int, first_step: int, settled_steps: int = 0) -> None:
        self._folder, self._world_size = folder, world_size
        self._next_step, self._settled_steps = first_step, settled_steps
        self._together = RankStream(folder / TOGETHER_FILE, first_step)
        self._ranks: dict[Path, RankStream] = {}

    def read(self, limit: int, *, is_whole: bool) -> list[tuple[int, dict[str, Any]]]:
        """See :meth:`RankStream.read`."""
        for path in self._folder.glob("rank*.jsonl"):
            self._ranks.setdefault(path, RankStream(path, self._next_step))
        for stream in self._streams():
            stream.look_ahead()
        found: list[tuple[int, dict[str, Any]]] = []
        while len(found) < limit and (records := self._complete_step(is_whole)):
            step = records[0]["step"]
            self._next_step = step + 1
            found.append((step, _means([{key: record[key] for key in record if key != "step"} for record in records])))
        return found

    def _complete_step(self, is_whole: bool) -> list[dict[str, Any]]:
        """Take and return the records of the next step; none while some of them are still to come."""
        ready = [stream for stream in self._streams() if self._has_next(stream)]
        step = min((stream.waiting[0]["step"] for stream in ready), default=self._next_step)
        having = [stream for stream in ready if stream.waiting[0]["step"] == step]
        is_complete = (
            is_whole or step < self._settled_steps or self._together in having or len(having) >= self._num_ranks(ready)
        )
        return [stream.waiting.popleft() for stream in having] if is_complete else []

    def _has_next(self, stream: RankStream) -> bool:
        """Whether a record is waiting; records that arrived too late for their step are dropped."""
        while stream.has_next() and stream.waiting[0]["step"] < self._next_step:
            stream.waiting.popleft()
        return bool(stream.waiting)

    def _num_ranks(self, streams: Sequence[RankStream]) -> int:
        """Return the smallest number of ranks that trained in any of the waiting records."""
        records = (record for stream in streams for record in stream.waiting)
        return min((int(record.get("num_ranks", self._world_size)) for record in records), default=self._world_size)

    def _streams(self) -> list[RankStream]:
        return [self._together, *self._ranks.values()]


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    flat = [flattened(record) for record in records]
    keys = dict.fromkeys(key for record in flat for key in record)
    return {key: _mean([record[key] for record in flat if key in record]) for key in keys}


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return statistics.fmean(present) if present else math.nan

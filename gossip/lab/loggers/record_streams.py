"""The records of a run that goes on, as its files grow: of one rank, or the means over all.

What a logger has not taken yet waits in these files, which are on the disk anyway: in memory there are at most
``AHEAD`` records of each rank, however long a logger is out of reach.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gossip.lab.experiments.records import TOGETHER_FILE
from gossip.lab.loggers.logger import flattened

AHEAD = 64
"""How many records of a rank are kept in memory."""

_STEP = re.compile(rb'\{"step": (\d+)')


class Stream(Protocol):
    """Records in the order of their steps, each once."""

    def read(self, limit: int, *, is_whole: bool) -> list[tuple[int, dict[str, Any]]]:
        """Those that have come since the last call, at most ``limit``: pairs of a step and its values.

        ``is_whole``: nothing more will come, so that there is nothing to wait for.
        """


class RankStream:
    """The records of one rank, from a step on.

    Parameters
    ----------
    path : Path
        Of lines as :class:`gossip.lab.experiments.records.JsonlWriter` writes them; it need not exist yet.
    first_step : int
        Records of earlier steps are left out.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        self.waiting: deque[dict[str, Any]] = deque()
        self._first_step, self._position = first_step, 0

    def has_next(self) -> bool:
        """Whether a record is waiting, or there is one to read."""
        if not self.waiting:
            self.look_ahead()
        return bool(self.waiting)

    def look_ahead(self) -> None:
        """Read on, until ``AHEAD`` records are waiting or there are no more."""
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
        """As of :class:`Stream`."""
        found: list[tuple[int, dict[str, Any]]] = []
        while len(found) < limit and self.has_next():
            record = self.waiting.popleft()
            found.append((record.pop("step"), record))
        return found

    def _is_wanted(self, line: bytes) -> bool:
        """Without parsing it: a run that goes on may have left millions of lines."""
        step = _STEP.match(line)
        return step is not None and int(step[1]) >= self._first_step


class MeanStream:
    """The means over the ranks, from a step on: over those that have a value, and NaN where none has.

    A step is there once all ranks that trained have its record. A rank whose record does not come has been lost if the
    others, further on, are fewer (``num_ranks``); then the mean is that of the others.

    Parameters
    ----------
    folder : Path
        Of the run.
    world_size : int
        Where records do not say how many ranks there are.
    first_step : int
        Records of earlier steps are left out.
    settled_steps : int
        So many steps are over for good, whoever has made them: what there is of them is all.
    """

    def __init__(self, folder: Path, world_size: int, first_step: int, settled_steps: int = 0) -> None:
        self._folder, self._world_size = folder, world_size
        self._next_step, self._settled_steps = first_step, settled_steps
        self._together = RankStream(folder / TOGETHER_FILE, first_step)
        self._ranks: dict[Path, RankStream] = {}

    def read(self, limit: int, *, is_whole: bool) -> list[tuple[int, dict[str, Any]]]:
        """As of :class:`Stream`."""
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
        """The records of the next step, taken; none where some are still to come."""
        ready = [stream for stream in self._streams() if self._has_next(stream)]
        step = min((stream.waiting[0]["step"] for stream in ready), default=self._next_step)
        having = [stream for stream in ready if stream.waiting[0]["step"] == step]
        is_complete = (
            is_whole or step < self._settled_steps or self._together in having or len(having) >= self._num_ranks(ready)
        )
        return [stream.waiting.popleft() for stream in having] if is_complete else []

    def _has_next(self, stream: RankStream) -> bool:
        """Whether a record is waiting; one that came too late for its step is dropped."""
        while stream.has_next() and stream.waiting[0]["step"] < self._next_step:
            stream.waiting.popleft()
        return bool(stream.waiting)

    def _num_ranks(self, streams: Sequence[RankStream]) -> int:
        """The fewest that trained in any of the steps that are known by now."""
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

"""The JSON lines that every process of a run writes: its record, which figures, reports and all other loggers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossip.lab.experiments.records import TOGETHER_FILE, JsonlWriter, cut_jsonl
from gossip.lab.loggers.logger import Beginning, Ending


class JsonlLogger:
    """``rank3.jsonl``, or ``workers.jsonl`` where one process has the means: a line per step, every value as it is.

    It is there whether it is chosen or not, and the only one whose records a resumed run takes back: those of steps
    that are made again.
    """

    libraries: tuple[str, ...] = ()

    def begin(self, beginning: Beginning) -> int:
        """Keep the records of the steps that are not made again, and go on behind them."""
        name = TOGETHER_FILE if beginning.rank is None else f"{beginning.records}.jsonl"
        path = beginning.folder / name
        cut_jsonl(path, beginning.step)
        self._writer = JsonlWriter(path)
        return beginning.step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; the operating system has it then."""
        self._writer.log(step, values)

    def flush(self) -> None:
        """Wait until the disk has all lines."""
        self._writer.sync()

    def end(self, ending: Ending) -> None:  # noqa: ARG002
        """Close the file: the summary, the figures and the model stand beside it."""
        self._writer.close()

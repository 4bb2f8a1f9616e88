"""The JSON-lines logger: the records that every process of a run writes, and that figures and other loggers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossip.lab.experiments.records import TOGETHER_FILE, JsonlWriter, cut_jsonl
from gossip.lab.loggers.logger import Beginning, Ending


class JsonlLogger:
    """Writes ``rank3.jsonl``, or ``workers.jsonl`` where one process has all ranks: a line per step, values unchanged.

    This logger is always active, whether it is selected or not. It is the only one from which a resumed run removes
    records: those of steps that are made again.
    """

    libraries: tuple[str, ...] = ()

    def begin(self, beginning: Beginning) -> int:
        """Remove the records of steps that are made again, and append after the remaining ones."""
        name = TOGETHER_FILE if beginning.rank is None else f"{beginning.records}.jsonl"
        path = beginning.folder / name
        cut_jsonl(path, beginning.step)
        self._writer = JsonlWriter(path)
        return beginning.step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line and flush it to the operating system."""
        self._writer.log(step, values)

    def flush(self) -> None:
        """Wait until all lines have reached the disk."""
        self._writer.sync()

    def end(self, ending: Ending) -> None:  # noqa: ARG002
        """Close the file; summary, figures and model are in the same folder anyway."""
        self._writer.close()

"""The logger interface, and the descriptions of a run that a logger gets at its beginning and at its end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from gossip.lab.experiments.records import leaves
from gossip.lab.experiments.run_folder import read_json, write_json

MEAN = "mean"
"""What loggers call the records that they get, the means over all ranks, where they keep files of them."""


@dataclass(frozen=True)
class Beginning:
    """The description of a run that is started or resumed, as a logger gets it.

    ``step`` is the number of steps made before the run was resumed, whose records are final. ``config`` lacks the
    sections that concern loggers, an empty ``group`` means none, and ``wait_s`` is the time limit in seconds for a call
    that needs another machine.
    """

    folder: Path
    world_size: int
    step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    wait_s: float = 30.0

    def read_state(self, logger: str) -> dict[str, Any]:
        """Read the state that :meth:`write_state` wrote, such as an id; empty if there is none or it cannot be read."""
        return read_json(self._state_file(logger))

    def write_state(self, logger: str, state: Mapping[str, Any]) -> None:
        """Atomically write a few plain values for the next attempt at this run."""
        self._state_file(logger).parent.mkdir(exist_ok=True)
        write_json(self._state_file(logger), state)

    def _state_file(self, logger: str) -> Path:
        return self.folder / "loggers" / f"{logger}_{MEAN}.json"


class Ending(NamedTuple):
    """The description of a run that has ended, as a logger gets it.

    ``status`` "stopped" means by a signal or Ctrl-C. ``summary`` is the content of ``summary.json``, ``figures`` are
    PNG files, and ``model`` is the file of the averaged model, if it is to be stored.
    """

    status: Literal["completed", "failed", "stopped"]
    summary: Mapping[str, Any]
    figures: tuple[Path, ...] = ()
    model: Path | None = None


class Logger(Protocol):
    """The interface of a logger: it takes the means of the records of all ranks, in step order.

    Construction checks the options and imports nothing. Any call may fail: the caller then begins the logger again and
    continues from the step that :meth:`begin` returns. Local.

    ``libraries`` are the import names of the required packages. The pip extra that installs them has the name under
    which the logger is registered.
    """

    libraries: tuple[str, ...]

    def begin(self, beginning: Beginning) -> int:
        """Open the run, or continue that of an earlier attempt; return the first step whose record the logger lacks."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the record of ``step``: numbers, None for a value that could not be measured, or mappings to these."""

    def flush(self) -> None:
        """Store or send everything that is pending, so that it survives this process."""

    def end(self, ending: Ending) -> None:
        """Close the run; nothing may be logged afterwards unless the logger is begun again."""


def flattened(values: Mapping[str, Any]) -> dict[str, float]:
    """Flatten a record to one number per key: mappings to ``key/name``, and None (not measured) to NaN."""
    return {key: math.nan if value is None else float(value) for key, value in leaves(values, separator="/")}

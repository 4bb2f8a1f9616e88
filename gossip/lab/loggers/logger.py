"""What a logger is, and what it is told of a run when it begins and when it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

STATE_FOLDER = "loggers"
"""In the run's folder: what loggers must still know when the run goes on, such as the id of a W&B run."""


@dataclass(frozen=True)
class Beginning:
    """What a logger is told of the run that begins or goes on.

    Attributes
    ----------
    folder : Path
        Of the run; it exists.
    rank : int or None
        Whose records the logger gets; None: means over all ranks.
    world_size : int
    step : int
        How many steps the run has made before it was resumed; their records will not change any more. 0 for a run that
        begins.
    config : mapping
        The resolved configuration, without what is about loggers.
    name, group : str
        Of the run, for people; an empty group is none.
    tags : tuple of str
    wait_s : float
        How long a call that needs another machine may take before it fails.
    """

    folder: Path
    rank: int | None
    world_size: int
    step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    wait_s: float = 30.0

    @property
    def records(self) -> str:
        """Which records the logger gets, in a word: ``mean`` or ``rank3``."""
        return "mean" if self.rank is None else f"rank{self.rank}"

    def read_state(self, logger: str) -> dict[str, Any]:
        """What :meth:`write_state` has left; empty if there is nothing that can be read."""
        try:
            state = json.loads(self._state_file(logger).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def write_state(self, logger: str, state: Mapping[str, Any]) -> None:
        """Leave a few plain values for the next attempt at this run, in one stroke."""
        path = self._state_file(logger)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(state) + "\n", encoding="utf-8")
        partial.replace(path)

    def _state_file(self, logger: str) -> Path:
        return self.folder / STATE_FOLDER / f"{logger}_{self.records}.json"


@dataclass(frozen=True)
class Ending:
    """What a logger is told of the run that has ended.

    Attributes
    ----------
    status : {"completed", "failed", "stopped"}
        "stopped": by a signal or Ctrl-C.
    summary : mapping
        As in ``summary.json``.
    figures : tuple of Path
        As PNG.
    model : Path or None
        The averaged model, where it is wanted.
    """

    status: Literal["completed", "failed", "stopped"]
    summary: Mapping[str, Any]
    figures: tuple[Path, ...] = ()
    model: Path | None = None


class Logger(Protocol):
    """Takes the records of one rank, or their means, in the order of the steps.

    Constructing one checks its options and loads nothing. It may fail at any call: whoever calls it then begins it
    again, and goes on from the step that it names. Local.

    Attributes
    ----------
    libraries : tuple of str
        What must be installed, as it is imported. The extra has the name under which the logger is registered.
    """

    libraries: tuple[str, ...]

    def begin(self, beginning: Beginning) -> int:
        """Open the run, or go on with the one that an earlier attempt has left.

        Returns
        -------
        int
            The first step whose record it lacks.
        """

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the record of ``step``: numbers, None for what could not be measured, and mappings to those."""

    def flush(self) -> None:
        """Hand over what is pending, so that it survives this process."""

    def end(self, ending: Ending) -> None:
        """Close the run; nothing may be logged afterwards, unless it is begun again."""


def flattened(values: Mapping[str, Any]) -> dict[str, float]:
    """One number per key, and of a mapping each under ``key/name``; NaN for what could not be measured."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": number for name, number in flattened(value).items()}
        else:
            flat[key] = math.nan if value is None else float(value)
    return flat

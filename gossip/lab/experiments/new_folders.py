"""The folders that a command makes: hydra makes them before anything is checked, and a refusal takes them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HYDRAS_NOTES = "multirun.yaml"  # of a sweep that has not begun a run
_made: list[Path] = []  # by this command, deepest first


def missing(folder: Path) -> list[Path]:
    """Which of ``folder`` and the folders above it are not there, deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of ``folders`` that are empty or there no longer; deepest first."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()


def remove_new() -> None:
    """Remove what is empty of the folders that hydra has made for this command, but for its own notes. Local."""
    if _made and _made[0].is_dir() and [path.name for path in _made[0].iterdir()] == [_HYDRAS_NOTES]:
        (_made[0] / _HYDRAS_NOTES).unlink()
    remove_empty(_made)
    _made.clear()


def _note(place: Any) -> None:
    _made.clear()
    with contextlib.suppress(Exception):  # what cannot be resolved hydra itself says in a moment
        _made.extend(missing(Path(str(place.dir)).absolute()))


def note_callback() -> Any:
    """Hydra's callback that notes which folders there were before. (Its class is made when hydra is loaded.)"""
    from hydra.experimental.callback import Callback

    class NoteCallback(Callback):
        def on_run_start(self, config: Any, **_: Any) -> None:
            _note(config.hydra.run)

        def on_multirun_start(self, config: Any, **_: Any) -> None:
            _note(config.hydra.sweep)

    return NoteCallback()

"""Removal of new folders after a refusal: hydra creates the run folder before anything has been checked."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

_HYDRAS_NOTES = "multirun.yaml"  # written by hydra for a sweep, before its first run
_made: list[Path] = []  # folders created by this command, deepest first


def remove_new() -> None:
    """Remove the folders that hydra created for this command and that hold nothing but hydra's own notes. Local."""
    if _made and _made[0].is_dir() and [path.name for path in _made[0].iterdir()] == [_HYDRAS_NOTES]:
        (_made[0] / _HYDRAS_NOTES).unlink()
    for path in _made:
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()
    _made.clear()


def _note(place: Any) -> None:
    _made.clear()
    with contextlib.suppress(Exception):  # hydra itself reports a path that cannot be resolved
        folder = Path(str(place.dir)).absolute()
        _made.extend(path for path in (folder, *folder.parents) if not path.exists())


def note_callback() -> Any:
    """Return the hydra callback that notes which folders are new. The class is defined here to import hydra lazily."""
    from hydra.experimental.callback import Callback

    class NoteCallback(Callback):
        def on_run_start(self, config: Any, **_: Any) -> None:
            _note(config.hydra.run)

        def on_multirun_start(self, config: Any, **_: Any) -> None:
            _note(config.hydra.sweep)

    return NoteCallback()

"""Where the numbers of a run go besides its own JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Takes the numbers of a step. Local: every rank has its own, or none.

    :class:`gossip.lab.experiments.records.JsonlWriter` is one too.
    """

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record ``values`` for ``step``: numbers, None for what could not be measured, and mappings to numbers."""

    def close(self) -> None:
        """Write what is pending; nothing may be logged afterwards."""


class TensorBoardLogger:
    """Writes every number as a TensorBoard scalar under its key; of a mapping each under ``key/name``.

    Parameters
    ----------
    folder : str or Path
        Of the event files; one per rank, or TensorBoard mixes the ranks' curves.

    Raises
    ------
    ModuleNotFoundError
        tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TensorBoardLogger needs tensorboard ({error}); install it in a clone of the repository, pip install "
                "'.[tensorboard]', or choose another logger",
                name=error.name,
            ) from error
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one scalar per number."""
        for key, value in values.items():
            items = value.items() if isinstance(value, Mapping) else [("", value)]
            for name, number in items:
                if number is not None:
                    self._writer.add_scalar(f"{key}/{name}" if name else key, number, global_step=step)

    def close(self) -> None:
        """Write what is pending and close the event file."""
        self._writer.close()

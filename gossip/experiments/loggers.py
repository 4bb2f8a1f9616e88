"""Where the numbers of a run go besides its own JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Logger(Protocol):
    """Takes the numbers of a step. Local: every rank has its own, or none.

    :class:`gossip.experiments.records.JsonlWriter` is one too.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` for ``step``."""

    def close(self) -> None:
        """Write what is pending; nothing may be logged afterwards."""


class TensorBoardLogger:
    """Writes every value as a TensorBoard scalar under its key.

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
                f"TensorBoardLogger needs tensorboard ({error}); install gossip-training[tensorboard] or choose "
                "another logger",
                name=error.name,
            ) from error
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, global_step=step)

    def close(self) -> None:
        """Write what is pending and close the event file."""
        self._writer.close()

"""Terminal output during a run: log lines, and a progress bar on rank 0."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from loguru import logger


def configure_logging(rank: int) -> None:
    """Log to stderr: from level INFO on rank 0, from level WARNING on the other ranks."""
    logger.remove()
    logger.add(
        _write_to_stderr,
        level="INFO" if rank == 0 else "WARNING",
        format="{time:HH:mm:ss} {level: <7} {message}"
        if rank == 0
        else f"{{time:HH:mm:ss}} {{level: <7}} rank {rank}: {{message}}",
    )


def _write_to_stderr(message: str) -> None:
    sys.stderr.write(message)  # sys.stderr is looked up on each call, because a progress bar replaces it


class ProgressBar:
    """A progress bar over the steps of a run with loss, accuracy and consensus distance; a context manager.

    Parameters
    ----------
    total_steps : int
        The number of steps of the run.
    first_step : int
        The number of steps that a resumed run has completed before.
    visible : bool
        Whether to show the bar; it is never shown where stderr is not a terminal.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0, visible: bool) -> None:
        self._bar: Any = None
        self._values: dict[str, float] = {}
        if visible and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[values]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=first_step, values="")

    def update(self, record: dict[str, Any]) -> None:
        """Advance by one step and show the newest values."""
        if self._bar is None:
            return
        shown = {
            "loss": "loss",
            "accuracy": "accuracy",
            "averaged_test_accuracy": "averaged test accuracy",
            "consensus_distance": "consensus distance",
        }
        self._values |= {label: record[key] for key, label in shown.items() if key in record}
        text = "  ".join(f"{label} {value:.3g}" for label, value in self._values.items())
        self._bar.update(self._task, advance=1, values=text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def restore_cursor() -> None:
    """Show the terminal's cursor again, which a worker killed during its progress bar leaves hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()

"""Terminal output during a run: log lines, and a progress bar on rank 0."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loguru import logger

_SHOWN = ("loss", "accuracy", "averaged_test_accuracy", "consensus_distance")


def configure_logging(rank: int) -> None:
    """Log to stderr: from level INFO on rank 0, from level WARNING on the other ranks."""

    def write(message: str) -> None:
        sys.stderr.write(message)  # sys.stderr is looked up on each call, because a progress bar replaces it

    logger.remove()
    logger.add(
        write,
        level="INFO" if rank == 0 else "WARNING",
        format="{time:HH:mm:ss} {level: <7} " + ("" if rank == 0 else f"rank {rank}: ") + "{message}",
    )


@contextlib.contextmanager
def progress_bar(
    total_steps: int, *, first_step: int = 0, visible: bool
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show a progress bar over the steps of a run within the block, where stderr is a terminal.

    Yields a function that takes the record of each step and shows the newest loss, accuracy and consensus distance.
    """
    if not visible or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    values: dict[str, float] = {}
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_steps, completed=first_step)

        def update(record: Mapping[str, Any]) -> None:
            values.update({key.replace("_", " "): record[key] for key in _SHOWN if key in record})
            bar.update(task, advance=1, description="  ".join(f"{name} {value:.3g}" for name, value in values.items()))

        yield update


def restore_cursor() -> None:
    """Show the terminal's cursor again, which a worker killed during its progress bar leaves hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()

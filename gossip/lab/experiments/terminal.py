"""What a run shows on the terminal: log lines, a progress bar on rank 0, and its results."""

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from loguru import logger

_SECONDS_BETWEEN_LINES = 30.0
_BAR_WIDTH = 20


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
    """Show a progress bar over the steps of a run within the block; where stderr is no terminal, log a line each 30 s.

    Yields a function that takes the record of each step and shows its loss beside the steps and the remaining time, for
    which the bar makes room.
    """
    if not visible or not sys.stderr.isatty():
        yield _lines(total_steps) if visible else lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    num_steps = MofNCompleteColumn(table_column=Column(no_wrap=True))
    remaining = TimeRemainingColumn(table_column=Column(no_wrap=True))
    loss = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    columns = (TextColumn("step"), num_steps, BarColumn(_BAR_WIDTH), remaining, loss)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_steps, completed=first_step)
        yield lambda record: bar.update(task, advance=1, description=f"loss {record['loss']:.3g}")


def _lines(total_steps: int) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that takes the record of each step and logs the last one before 30 s have passed."""
    said_at = ended_at = time.monotonic()

    def say(record: Mapping[str, Any]) -> None:
        nonlocal said_at, ended_at
        now = time.monotonic()
        next_at, ended_at = now + (now - ended_at), now  # if the next step takes as long
        if next_at - said_at > _SECONDS_BETWEEN_LINES:
            said_at = now
            logger.info("step {} of {}: loss {:.3g}", record["step"] + 1, total_steps, record["loss"])

    return say


def restore_cursor() -> None:
    """Show the terminal's cursor again, which a worker killed during its progress bar leaves hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()


def print_run(summary: Mapping[str, Any], folder: Path) -> None:
    """Print the results of a completed run, and the path of its folder with the names of the figures there."""
    what = [summary["method"], summary["topology"], summary["data"]]
    world_size, local_size = summary["world_size"], summary.get("local_size", 1)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if local_size > 1:
        ranks += f" in groups of {local_size} (shard={summary['shard']})"
    title = f"{', '.join(filter(None, what))}: {ranks}, seed {summary['seed']}"
    # What the method or the engine does not measure has no value.
    rows = [(name, value) for name, value in _rows(summary).items() if value is not None]
    print_table(title, ("result", "value"), rows)
    figures = ", ".join(sorted(path.name for path in folder.glob("*.svg")))
    print(f"run folder: {folder}" + (f" (figures: {figures})" if figures else ""))


def _rows(summary: Mapping[str, Any]) -> dict[str, str | None]:
    def percent(name: str) -> str:
        return f"{summary[name]:.2%}"

    def distance(when: str) -> str:
        absolute, relative = (summary[f"consensus_distance_{when}{of}"] for of in ("", "_relative"))
        return f"{absolute:.3g} (relative {relative:.2g})"

    def seconds(name: str) -> str | None:
        return None if summary[name] is None else f"{summary[name]:.2f} s"

    parts = {"in steps": summary["training_time_s"], "in evaluations": summary["evaluation_s"]}
    sent = summary["bytes_sent_per_step"]
    parts["starting processes, writing files"] = summary["wall_time_s"] - sum(parts.values())
    return {
        "test accuracy, local replicas: mean": percent("local_test_accuracy_mean"),
        "test accuracy, local replicas: worst": percent("local_test_accuracy_worst"),
        "test accuracy, local replicas: best": percent("local_test_accuracy_best"),
        "test accuracy, global average": percent("averaged_test_accuracy"),
        "test loss, global average": f"{summary['averaged_test_loss']:.4f}",
        "consensus distance before the average": distance("before"),
        "consensus distance after": distance("after"),
        "steps": f"{summary['steps']} ({summary['epochs']} epoch{'s' if summary['epochs'] > 1 else ''})",
        "wall time": f"{summary['wall_time_s']:.1f} s",
        **{f"of which {what}": f"{time_s:.1f} s" for what, time_s in parts.items()},
        "exposed wait, mean of the ranks": seconds("exposed_wait_s"),
        "exchanges beside computation, over buckets": seconds("overlapped_s"),
        "sent per rank and step": f"{sent / 2**20:.4g} MiB" if sent >= 2**20 else f"{sent / 2**10:.4g} KiB",
        **{
            f"ranks from step {change['step']} on": ", ".join(map(str, change["members"]))
            for change in summary.get("changes_of_ranks", ())
        },
    }


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Print a table to stdout; return the headings of the last columns, for which a terminal has no room.

    Headings take several lines, texts and numbers one. Where stdout is no terminal, there is room for all.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not sys.stdout.isatty():
        console.width = 10_000
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = zip(headings, zip(*rows, strict=True), strict=True)
    widths = [max(map(len, (*heading.split(), *cells))) for heading, cells in columns]
    fits = sum(widths[:2]) + 2 <= console.width  # otherwise one column of values is shown on several lines
    for number, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        if number >= 2 and sum(widths[: number + 1]) + number + 1 > console.width:
            break
        justify: Literal["right", "left"] = "right" if number else "left"
        table.add_column(heading, justify=justify, overflow="fold", width=width if fits else None)
    shown = len(table.columns)
    for cells in rows:
        table.add_row(*cells[:shown])
    console.print(table, markup=False, highlight=False)
    return list(headings[shown:])


def print_text(text: str) -> None:
    """Print a text to stdout, on a terminal in lines that end with a word."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False) if width else text)

"""Tables on the terminal: the results of one run, or one line per run of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.lab.experiments.run_summary import percent, rows, seconds, size

if TYPE_CHECKING:
    from rich.table import Table


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "averaged\ntest accuracy": lambda run: percent(run["averaged_test_accuracy"]),
    "local\nmean": lambda run: percent(run["local_test_accuracy_mean"]),
    "local\nworst": lambda run: percent(run["local_test_accuracy_worst"]),
    "consensus\ndistance": lambda run: _distance(run["consensus_distance_before"]),
    "relative\nconsensus distance": lambda run: _distance(run["consensus_distance_before_relative"]),
    "steps": lambda run: str(run["steps"]),
    "time\nin steps": lambda run: seconds(run["training_time_s"]),
    "exposed\nwait": lambda run: seconds(run["exposed_wait_s"]),
    "sent per\nrank and step": lambda run: size(run["bytes_sent_per_step"]),
}
"""What a sweep's table says of a completed run."""


def print_run(summary: Mapping[str, Any], folder: Path) -> None:
    """Print the results of a completed run and the path of its folder."""
    from rich.table import Table

    what = [summary["method"], summary["topology"], summary["data"]]
    table = Table(title=f"{', '.join(filter(None, what))}: {_ranks(summary)}, seed {summary['seed']}")
    table.add_column("result")
    table.add_column("value", justify="right")
    for name, value in rows(summary):
        table.add_row(name, value)
    print_table(table)
    print(f"run folder: {folder}")


def print_sweep(summaries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Print one line per run, then the reason of each failure."""
    from rich.markup import escape  # rich would interpret a list such as logger=[jsonl,wandb] as a style tag
    from rich.table import Table

    overrides = [summary["overrides"] for summary in summaries]
    common = [each for each in overrides[0] if all(each in other for other in overrides)] if len(overrides) > 1 else []
    table = Table(title=escape(" ".join([f"{len(summaries)} runs", *common])))
    for column in ("job", "overrides", "status"):
        table.add_column(column)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for summary in summaries:
        cells = [text(summary) for text in _COLUMNS.values()] if summary["status"] == "completed" else ()
        own = [override for override in summary["overrides"] if override not in common]
        table.add_row(summary["job"], escape("\n".join(own)), summary["status"], *cells)
    print_table(table)
    for summary in summaries:
        if summary["status"] != "completed":
            print(f"job {summary['job']} {summary['status']}: {summary['reason']}")
    print(f"sweep folder: {folder}")


def _distance(distance: float | None) -> str:
    return "not finite" if distance is None else f"{distance:.2g}"


def _ranks(summary: Mapping[str, Any]) -> str:
    world_size, local_size = summary["world_size"], summary.get("local_size", 1)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return ranks if local_size == 1 else f"{ranks} in groups of {local_size} (shard={summary['shard']})"


def print_table(table: Table) -> None:
    """Print a table to stdout, at its full width if stdout is not a terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not sys.stdout.isatty():  # a file has no terminal width into which the table must fit
        unlimited = console.options.update(max_width=10_000)
        console.width = Measurement.get(console, unlimited, table).maximum
    console.print(table)

"""Tables on the terminal: the results of one run, or one line per run of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.lab.experiments.run_summary import percent, rows, seconds, size

if TYPE_CHECKING:
    from rich.table import Table


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

    common = _common_overrides(summaries)
    table = Table(title=escape(" ".join([f"{len(summaries)} runs", *common])))
    for column in ("job", "overrides", "status"):
        table.add_column(column)
    for column in (
        "averaged\ntest accuracy",
        "local\nmean",
        "local\nworst",
        "consensus\ndistance",
        "relative\nconsensus distance",
        "steps",
        "time\nin steps",
        "exposed\nwait",
        "sent per\nrank and step",
    ):
        table.add_column(column, justify="right")
    for summary in summaries:
        cells = _sweep_cells(summary) if summary["status"] == "completed" else ()
        own = [override for override in summary["overrides"] if override not in common]
        table.add_row(summary["job"], escape("\n".join(own)), summary["status"], *cells)
    print_table(table)
    for summary in summaries:
        if summary["status"] != "completed":
            print(f"job {summary['job']} {summary['status']}: {summary['reason']}")
    print(f"sweep folder: {folder}")


def _sweep_cells(summary: Mapping[str, Any]) -> list[str]:
    distances = summary["consensus_distance_before"], summary["consensus_distance_before_relative"]
    return [
        percent(summary["averaged_test_accuracy"]),
        percent(summary["local_test_accuracy_mean"]),
        percent(summary["local_test_accuracy_worst"]),
        *("not finite" if distance is None else f"{distance:.2g}" for distance in distances),
        str(summary["steps"]),
        seconds(summary["training_time_s"]),
        seconds(summary["exposed_wait_s"]),
        size(summary["bytes_sent_per_step"]),
    ]


def _common_overrides(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the overrides that all of several runs have in common; none for a single run."""
    if len(summaries) < 2:
        return []
    first, *others = (summary["overrides"] for summary in summaries)
    return [override for override in first if all(override in other for other in others)]


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

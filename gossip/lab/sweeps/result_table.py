"""The result of a sweep on the terminal: one line per row of its document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossip.lab.experiments.console_table import print_table
from gossip.lab.experiments.run_summary import percent, size


def print_rows(document: Mapping[str, Any], folder: Path) -> None:
    """Print the rows, then why runs failed that did, and where the report is."""
    from rich.table import Table

    metric = document["metric"]
    target = "target" if metric["target"] is None else f"{metric['target']:g}"
    table = Table(title=f"{document['title']}: mean and standard deviation over seeds")
    for column in ("", "ranks", "partition", "algorithm", "compression", "seeds"):
        table.add_column(column)
    columns = _columns(metric["name"])
    for heading, _, _ in columns:
        table.add_column(heading.format(target=target), justify="right")
    for row in document["rows"]:
        table.add_row(
            row["label"],
            str(row["world_size"]),
            row["partition"],
            row["algorithm"] or "",
            row["compression"] or "",
            f"{len(row['seeds']) - row['num_failed']}" + (f" of {len(row['seeds'])}" if row["num_failed"] else ""),
            *(_cell(row["values"].get(name), shown) for _, name, shown in columns),
        )
    print_table(table)
    for row in document["rows"]:
        for reason in row["reasons"]:
            print(f"{row['label']}, {row['world_size']} ranks, {row['partition']}: failed: {reason}")
    print(f"sweep folder: {folder}")


def _columns(metric: str) -> list[tuple[str, str, Callable[[float], str]]]:
    """Heading, name of the value, and how it is shown."""
    value = percent if metric == "accuracy" else "{:.4f}".format
    local = "local_accuracy" if metric == "accuracy" else "local_loss"
    return [
        (f"averaged\n{metric}", f"averaged_{metric}", value),
        ("local\nmean", f"{local}_mean", value),
        ("local\nworst", f"{local}_worst", value),
        ("relative\nconsensus distance", "consensus_distance_relative", "{:.2g}".format),
        ("sent per\nrank and step", "bytes_per_step", size),
        ("rounds\nto {target}", "rounds_to_target", "{:.0f}".format),
        ("bytes\nto {target}", "bytes_to_target", size),
        ("predicted\ntime to {target}", "predicted_time_to_target_s", "{:.3g} s".format),
    ]


def _cell(value: Mapping[str, Any] | None, shown: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    return shown(value["mean"]) if value["spread"] is None else f"{shown(value['mean'])} ± {shown(value['spread'])}"

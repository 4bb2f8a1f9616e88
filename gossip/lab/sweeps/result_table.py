"""The results of a sweep on the terminal: one line per row of the result document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gossip.lab.experiments.console_table import print_table
from gossip.lab.experiments.run_summary import percent, size
from gossip.lab.report import Document, Value
from gossip.lab.report.report_files import PAGE_FILE
from gossip.lab.report.verdict import verdict


def print_rows(document: Document, folder: Path) -> None:
    """Print the rows, then the reason of each failure, the verdict and the path of the report."""
    from rich.table import Table

    rows, metric = document.rows, document.metric
    target = "target" if metric.target is None else f"{metric.target:g}"
    table = Table(title=f"{document.title}: mean and standard deviation over seeds, or 95 % interval in brackets")
    parameters = list(dict.fromkeys(row.tuning.parameter for row in rows if row.tuning is not None))
    for column in ("", "ranks", "partition", "algorithm", "compression", "seeds", *parameters):
        table.add_column(column)
    columns = _columns(metric.name)
    for heading, _, _ in columns:
        table.add_column(heading.format(target=target), justify="right")
    has_bars = any(row.bars for row in rows)
    if has_bars:
        table.add_column("bars")
    for row in rows:
        table.add_row(
            ", ".join(filter(None, (row.label, row.condition))),
            str(row.world_size),
            row.partition,
            row.algorithm or "",
            row.compression or "",
            f"{len(row.seeds) - row.num_failed}" + (f" of {len(row.seeds)}" if row.num_failed else ""),
            *("" if row.tuning is None else row.tuning.text for _ in parameters),
            *(_cell(row.values.get(name), shown) for _, name, shown in columns),
            *[row.verdict] * has_bars,
        )
    print_table(table)
    for row in rows:
        for reason in row.reasons:
            place = ", ".join(filter(None, (row.label, f"{row.world_size} ranks", row.partition, row.condition)))
            print(f"{place}: failed: {reason}")
    for sentence in verdict(document):
        print(sentence)
    print(f"report: {folder / PAGE_FILE}")


def _columns(metric: str) -> list[tuple[str, str, Callable[[float], str]]]:
    """Return the heading, the name of the value and the formatter of each column."""
    value = percent if metric == "accuracy" else "{:.4f}".format
    local = "local_accuracy" if metric == "accuracy" else "local_loss"
    against = [
        ("average\nto all-reduce", "average_difference", "{:+.2f}".format),
        ("its loss\nto all-reduce", "loss_ratio", "{:.3f}".format),
        ("worst\nto all-reduce", "worst_difference", "{:+.2f}".format),
        ("its loss\nto all-reduce", "worst_loss_ratio", "{:.3f}".format),
    ]
    return [
        (f"averaged\n{metric}", f"averaged_{metric}", value),
        ("local\nmean", f"{local}_mean", value),
        ("local\nworst", f"{local}_worst", value),
        *(column for column in against if metric == "accuracy" or column[1].endswith("ratio")),
        ("consensus\ndistance", "consensus_distance", "{:.2g}".format),
        ("relative\nconsensus distance", "consensus_distance_relative", "{:.2g}".format),
        ("sent per\nrank and step", "bytes_per_step", size),
        ("rounds\nto {target}", "rounds_to_target", "{:.0f}".format),
        ("bytes\nto {target}", "bytes_to_target", size),
        ("predicted\ntime to {target}", "predicted_time_to_target_s", "{:.3g} s".format),
    ]


def _cell(value: Value | None, shown: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    if value.interval is not None:
        low, high = map(shown, value.interval)
        return f"{shown(value.mean)} ({low} to {high})"
    return shown(value.mean) if value.spread is None else f"{shown(value.mean)} ± {shown(value.spread)}"

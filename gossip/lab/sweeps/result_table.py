"""The results of a sweep on the terminal: one line per row of the result document."""

from __future__ import annotations

from pathlib import Path

from gossip.lab.experiments.console_table import print_table
from gossip.lab.report import Document
from gossip.lab.report.report_files import PAGE_FILE
from gossip.lab.report.report_markdown import CHIEF, LEGEND, texts
from gossip.lab.report.verdict import verdict

_SHOWN = (
    *CHIEF, "local_accuracy_mean", "consensus_distance", "consensus_distance_relative", "rounds_to_target",
    "bytes_to_target", "predicted_time_to_target_s",
)  # fmt: skip


def print_rows(document: Document, folder: Path) -> None:
    """Print the rows, then the reason of each failure, the verdict and the path of the report."""
    from rich.table import Table

    rows = texts(document, _SHOWN)
    table = Table(*rows[0], title=f"{document.title}: {LEGEND}")
    for cells in rows:
        table.add_row(*cells.values())
    print_table(table)
    for row in document.rows:
        for reason in row.reasons:
            place = ", ".join(filter(None, (row.label, f"{row.world_size} ranks", row.partition, row.condition)))
            print(f"{place}: failed: {reason}")
    for sentence in verdict(document):
        print(sentence)
    print(f"report: {folder / PAGE_FILE}")

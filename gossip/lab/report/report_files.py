"""The files of a report: its page, its document, and each setting compared with all-reduce as CSV and as Markdown."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from gossip.lab.report.columns import Column, columns, text_columns, value_names
from gossip.lab.report.report_document import Document, Row, Setting
from gossip.lab.report.report_page import render_page
from gossip.lab.report.verdict import verdict

PAGE_FILE, TABLE_FILE, DOCUMENT_FILE, MARKDOWN_FILE = "report.html", "results.csv", "results.json", "results.md"

CHIEF = (
    "averaged_accuracy", "averaged_loss", "local_accuracy_worst", "average_difference", "loss_ratio",
    "worst_difference", "worst_loss_ratio", "bytes_per_step",
)  # fmt: skip
"""The values that are shown."""

LEGEND = "means over the seeds ± sample standard deviation, or (95 % interval)"


def write_report(document: Document, folder: Path) -> None:
    """Write report.html, results.csv, results.json and results.md of a sweep into a new or an old folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE_FILE).write_text(render_page(document), encoding="utf-8")
    (folder / DOCUMENT_FILE).write_text(document.model_dump_json(indent=1, exclude_unset=True) + "\n", encoding="utf-8")
    (folder / MARKDOWN_FILE).write_text(markdown(document), encoding="utf-8")
    _write_table(document, folder / TABLE_FILE)


def _write_table(document: Document, path: Path) -> None:
    """Write one CSV line per row: its settings, each value as ``name`` and ``name_spread``, its seeds and commands.

    If a value has an interval, its ends are ``name_low`` and ``name_high``.
    """
    lines = [_cells(row, value_names(document.rows)) for row in document.rows]
    columns = dict.fromkeys(name for line in lines for name in line)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(lines)


def _cells(row: Row, names: list[str]) -> dict[str, Any]:
    """Return the cells of a row by column; None stands for an empty cell."""
    cells: dict[str, Any] = {name: getattr(row, name) for name in (*Setting.model_fields, "num_failed", "status")}
    for name in names:
        value = row.values.get(name)
        cells[name], cells[f"{name}_spread"] = (None, None) if value is None else (value.mean, value.spread)
    for name, known in row.values.items():
        if known is not None and known.interval is not None:
            cells[f"{name}_low"], cells[f"{name}_high"] = known.interval
    if row.tuning is not None:
        cells |= {"tuned": row.tuning.parameter, "tuned_value": row.tuning.value}
        cells["trials"] = "; ".join(trial.text for trial in row.tuning.trials)
    return {
        **cells,
        "seeds": " ".join(map(str, row.seeds)),
        "reasons": "; ".join(row.reasons),
        "commands": "; ".join(row.commands),
    }


def texts(document: Document) -> tuple[list[Column], list[list[str]]]:
    """Return the columns (settings in which rows differ, what was tuned, the chief values), and the texts of rows."""
    settings, tuned = text_columns(document.rows)
    every = [*settings, *tuned, *(column for column in columns(document) if column.name in CHIEF)]
    return every, [[row.label, *(column.text(row) or "-" for column in every)] for row in document.rows]


def markdown(document: Document) -> str:
    """Return the verdict, and the table below a line that explains its numbers."""
    every, rows = texts(document)
    headings = ["setting", *(column.heading for column in every)]
    alignment = ["---", *("---" if column.quantity is None else "---:" for column in every)]
    lines = [headings, alignment, *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    sentences = "".join(f"- {sentence}\n" for sentence in verdict(document))
    return "\n\n".join(filter(None, (sentences.rstrip(), f"{document.title}: {LEGEND}", table))) + "\n"

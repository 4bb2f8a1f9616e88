"""The files of a report."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossip.lab.report.columns import value_names
from gossip.lab.report.report_document import Document, Row, read_document
from gossip.lab.report.report_page import render_page

PAGE_FILE, TABLE_FILE, DOCUMENT_FILE = "report.html", "results.csv", "results.json"
_SETTINGS = (
    "label", "method", "topology", "world_size", "partition", "algorithm", "compression", "engine",
    "num_failed", "status",
)  # fmt: skip


def write_report(document: Mapping[str, Any], folder: Path) -> None:
    """Write report.html, results.csv and results.json of a sweep; ones that are there are replaced.

    Parameters
    ----------
    document
        Plain data as JSON has it, without numbers that are not finite: ``title``, ``metric`` and ``rows``, and where
        they are known ``description``, ``settings``, ``cluster``, ``environment`` and ``drawings``; see
        :func:`read_document` and the classes that it returns.
    folder
        Made if it does not exist.

    Raises
    ------
    ValueError
        If the document is malformed: nothing is written then.
    """
    checked = read_document(document)
    page = render_page(checked)
    plain = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE_FILE).write_text(page, encoding="utf-8")
    (folder / DOCUMENT_FILE).write_text(plain + "\n", encoding="utf-8")
    _write_table(checked, folder / TABLE_FILE)


def _write_table(document: Document, path: Path) -> None:
    """Write one line per row: its settings, each value as ``name`` and ``name_spread``, its seeds and commands."""
    names = value_names(document.rows)
    columns = [*_SETTINGS, *(column for name in names for column in (name, f"{name}_spread"))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "seeds", "reasons", "commands"])
        for row in document.rows:
            writer.writerow(
                [*_cells(row, names), " ".join(map(str, row.seeds)), "; ".join(row.reasons), "; ".join(row.commands)]
            )


def _cells(row: Row, names: list[str]) -> list[Any]:
    """What is None is left empty."""
    cells: list[Any] = [getattr(row, name) for name in _SETTINGS]
    for name in names:
        value = row.values.get(name)
        cells += (None, None) if value is None else (value.mean, value.spread)
    return cells

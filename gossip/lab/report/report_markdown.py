"""The results of a sweep as a table of texts, and its Markdown: each setting compared with all-reduce."""

from __future__ import annotations

from gossip.lab.report.columns import Column, columns, text_columns
from gossip.lab.report.report_document import Document
from gossip.lab.report.verdict import verdict

CHIEF = (
    "averaged_accuracy", "averaged_loss", "local_accuracy_worst", "average_difference", "loss_ratio",
    "worst_difference", "worst_loss_ratio", "bytes_per_step",
)  # fmt: skip
"""The values that are shown."""

LEGEND = "means over the seeds ± sample standard deviation, or (95 % interval)"


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

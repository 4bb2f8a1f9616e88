"""The results of a sweep as a table of texts, and its Markdown: each setting compared with all-reduce."""

from __future__ import annotations

from collections.abc import Container

from gossip.lab.report.columns import columns, text_columns
from gossip.lab.report.report_document import Document
from gossip.lab.report.verdict import verdict

CHIEF = (
    "averaged_accuracy", "averaged_loss", "local_accuracy_worst", "average_difference", "loss_ratio",
    "worst_difference", "worst_loss_ratio", "bytes_per_step",
)  # fmt: skip
"""The values in the Markdown."""

LEGEND = "means over the seeds ± sample standard deviation, or (95 % interval)"


def texts(document: Document, shown: Container[str]) -> list[dict[str, str]]:
    """Return the cells of each row by their headings: settings in which rows differ, these of the values, and bars."""
    settings, outcomes = text_columns(document.rows)
    tuned = [column for column in outcomes if column.name != "bars"]
    values = [column for column in columns(document) if column.name in shown]
    every = [*settings, *tuned, *values, *outcomes[len(tuned) :]]
    headings = [f"{column.title} {column.explanation}".strip().lower() for column in every]
    return [
        {"setting": row.label, **{title: each.text(row) or "-" for title, each in zip(headings, every, strict=True)}}
        for row in document.rows
    ]


def markdown(document: Document) -> str:
    """Return the verdict, and the table below a line that explains its numbers."""
    found = texts(document, CHIEF)
    headings = list(found[0]) if found else ["setting"]
    of_values = {f"{column.title} {column.explanation}".strip().lower() for column in columns(document)}
    alignment = ["---:" if heading in of_values else "---" for heading in headings]
    lines = [headings, alignment, *(list(cells.values()) for cells in found)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    sentences = "".join(f"- {sentence}\n" for sentence in verdict(document))
    return "\n\n".join(filter(None, (sentences.rstrip(), f"{document.title}: {LEGEND}", table))) + "\n"

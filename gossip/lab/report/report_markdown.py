"""The results of a sweep as a table of texts, and its Markdown: each setting compared with all-reduce."""

from __future__ import annotations

from collections.abc import Container

from gossip.lab.report.columns import columns
from gossip.lab.report.report_document import Document, Row
from gossip.lab.report.report_table import SETTINGS, setting_text
from gossip.lab.report.series import varying
from gossip.lab.report.verdict import verdict

CHIEF = (
    "averaged_accuracy", "averaged_loss", "local_accuracy_worst", "average_difference", "loss_ratio",
    "worst_difference", "worst_loss_ratio", "bytes_per_step",
)  # fmt: skip
"""The values in the Markdown."""

LEGEND = "means over the seeds ± sample standard deviation, or (95 % interval)"


def texts(document: Document, shown: Container[str]) -> list[dict[str, str]]:
    """Return the cells of each row by their headings: settings in which rows differ, these of the values, and bars."""
    rows = document.rows
    settings = [name for name in varying(rows, list(SETTINGS)) if name != "topology"]
    values = [column for column in columns(rows, document.metric) if column.name in shown]
    parameters = dict.fromkeys(row.tuning.parameter for row in rows if row.tuning is not None)

    def cells(row: Row) -> dict[str, str]:
        found = {"setting": row.label, **{SETTINGS[name].lower(): setting_text(row, name) for name in settings}}
        for name in parameters:
            found[name] = row.tuning.text if row.tuning is not None and row.tuning.parameter == name else "-"
        for column in values:
            value = row.values.get(column.name)
            heading = f"{column.title} {column.explanation}".strip().lower()
            found[heading] = "-" if value is None else column.quantity.value_text(value)
        return {**found, "bars": row.verdict or "-"} if any(each.bars for each in rows) else found

    return [cells(row) for row in rows]


def markdown(document: Document) -> str:
    """Return the verdict, and the table below a line that explains its numbers."""
    found = texts(document, CHIEF)
    headings = list(found[0]) if found else ["setting"]
    of_text = ("setting", "bars", *(title.lower() for title in SETTINGS.values()))
    alignment = ["---" if heading in of_text else "---:" for heading in headings]
    lines = [headings, alignment, *(list(cells.values()) for cells in found)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    sentences = "".join(f"- {sentence}\n" for sentence in verdict(document))
    return "\n\n".join(filter(None, (sentences.rstrip(), f"{document.title}: {LEGEND}", table))) + "\n"

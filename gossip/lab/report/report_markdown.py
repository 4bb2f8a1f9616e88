"""The results of a sweep as a Markdown table: each setting compared with all-reduce, and the bytes that it sends."""

from __future__ import annotations

from gossip.lab.report.columns import columns
from gossip.lab.report.report_document import Document, Row
from gossip.lab.report.report_table import SETTINGS, setting_text
from gossip.lab.report.series import varying
from gossip.lab.report.verdict import verdict

_SHOWN = (
    "averaged_accuracy", "averaged_loss", "local_accuracy_worst", "average_difference", "loss_ratio",
    "worst_difference", "worst_loss_ratio", "bytes_per_step",
)  # fmt: skip


def markdown(document: Document) -> str:
    """Return the verdict, and the table below a line that explains its numbers."""
    rows = document.rows
    settings = [name for name in varying(rows, list(SETTINGS)) if name != "topology"]
    values = [column for column in columns(rows, document.metric) if column.name in _SHOWN]
    parameters = dict.fromkeys(row.tuning.parameter for row in rows if row.tuning is not None)
    has_bars = any(row.bars for row in rows)
    headings = ["setting", *(SETTINGS[name].lower() for name in settings), *parameters]
    headings += [" ".join(filter(None, (column.title, column.explanation))).lower() for column in values]
    headings += ["bars"] * has_bars

    def line(row: Row) -> list[str]:
        cells = [row.label, *(setting_text(row, name) for name in settings)]
        cells += [_tuned(row, parameter) for parameter in parameters]
        for column in values:
            value = row.values.get(column.name)
            cells.append("-" if value is None else column.quantity.value_text(value))
        return [*cells, *([row.verdict or "-"] * has_bars)]

    alignment = ["---"] * (1 + len(settings)) + ["---:"] * (len(parameters) + len(values)) + ["---"] * has_bars
    lines = [headings, alignment, *map(line, rows)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    sentences = "".join(f"- {sentence}\n" for sentence in verdict(document))
    legend = f"{document.title}: means over the seeds ± sample standard deviation, or (95 % interval)"
    return "\n\n".join(filter(None, (sentences.rstrip(), legend, table))) + "\n"


def _tuned(row: Row, parameter: str) -> str:
    return row.tuning.text if row.tuning is not None and row.tuning.parameter == parameter else "-"

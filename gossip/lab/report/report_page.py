"""The files of a report: its page, its document, and each setting compared with all-reduce as CSV and as Markdown.

The page is what the template report.html.jinja shows of a document. The columns of its table are the
settings in which rows differ, what was tuned, and the values. A verdict is its findings in sentences: one for each
number of ranks, partition of the data and condition.
"""

import base64
import csv
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from gossip.lab.report.chart_specs import CONFIG, make_curves, make_ends, make_spec
from gossip.lab.report.charts import DIVIDING, RESULTS, Chart, Panel, Series, charts, panels, setting, told, varying
from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, POINTS, RATIO, SECONDS, Quantity, Scale
from gossip.lab.report.report_document import FEWEST_SEEDS, Document, Metric, Row, Setting, Value

SETTINGS = {
    name: "Ranks" if name == "world_size" else name.capitalize()
    for name in Setting.model_fields
    if name not in ("label", "method")
}
"""The titles of the settings besides the label, which has the topology with its options already."""
TO_ALL_REDUCE = {"accuracy": "average_difference", "loss": "loss_ratio"}
"""For each metric, the value that compares a row with all-reduce."""
_COSTS = ("predicted_time_to_target_s", "bytes_to_target", "predicted_step_time_s", "bytes_per_step")
PAGE_FILE, TABLE_FILE, DOCUMENT_FILE, MARKDOWN_FILE = "report.html", "results.csv", "results.json", "results.md"

CHIEF = (
    "averaged_accuracy", "averaged_loss", "local_accuracy_worst", "average_difference", "loss_ratio",
    "worst_difference", "worst_loss_ratio", "bytes_per_step", "bytes_to_target", "rounds_to_target",
    "predicted_step_time_s", "predicted_time_to_target_s",
)  # fmt: skip
"""The values that are shown."""

LEGEND = "means over the seeds ± sample standard deviation, or (95 % interval)"

#: The libraries with which charts.js draws, in the order of their dependencies.
_LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
_NOTHING = "–"  # noqa: RUF001
_NUM_SHOWN = 7  # columns, which a width of 1280 pixels and a sheet of paper can take


class Column(NamedTuple):
    """A column of the table, which shows a text or, if it has a quantity, a value, of which one may be the best.

    Either "higher" or "lower" values are better, or neither, among the rows of some methods: without communication
    nothing is sent, which is not an achievement.
    """

    name: str
    title: str
    explanation: str = ""
    quantity: Quantity | None = None
    better: str | None = None
    among: tuple[str, ...] = ("gossip", "ddp")

    @property
    def heading(self) -> str:
        """Its title and explanation in one line."""
        return f"{self.title} {self.explanation}".strip().lower()

    def text(self, row: Row) -> str | None:
        """Return what the column shows of a row; None if there is nothing."""
        if self.quantity is not None:
            value = row.values.get(self.name)
            return None if value is None else self.quantity.value_text(value)
        if self.name in SETTINGS:
            return setting(row, self.name)
        return row.tuning.text if row.tuning is not None and row.tuning.parameter == self.name else None


COLUMNS = (
    Column("averaged_accuracy", "Accuracy", "of the averaged model", FRACTION, "higher"),
    Column("averaged_loss", "Loss", "of the averaged model", NUMBER, "lower"),
    Column("local_accuracy_mean", "Local accuracy, mean", "over the ranks", FRACTION, "higher"),
    Column("local_accuracy_worst", "Local accuracy, worst", "of the ranks", FRACTION, "higher"),
    Column("average_difference", "To all-reduce", "accuracy in points", POINTS, "higher", ("gossip",)),
    Column("loss_ratio", "Loss to all-reduce", "ratio", RATIO, "lower", ("gossip",)),
    Column("worst_difference", "Worst local to all-reduce", "accuracy in points", POINTS, "higher", ("gossip",)),
    Column("worst_loss_ratio", "Worst local loss to all-reduce", "ratio", RATIO, "lower", ("gossip",)),
    Column("consensus_distance", "Consensus distance", "absolute, at the end", NUMBER, "lower", ("gossip",)),
    Column("consensus_distance_relative", "Consensus distance", "relative, at the end", NUMBER, "lower", ("gossip",)),
    Column("bytes_per_step", "Sent per step", "by one rank", BYTES, "lower"),
    Column("bytes_to_target", "Sent to target", "by one rank", BYTES, "lower"),
    Column("rounds_to_target", "Rounds to target", "steps", NUMBER, "lower"),
    Column("predicted_step_time_s", "Step time", "predicted", SECONDS, "lower"),
    Column("predicted_time_to_target_s", "Time to target", "predicted", SECONDS, "lower"),
    Column("predicted_total_time_s", "Total time", "predicted", SECONDS, "lower"),
    Column("steps", "Steps", "local updates", NUMBER),
    Column("training_time_s", "Run time", "of the experiment itself", SECONDS),
    Column("local_loss_mean", "Local loss, mean", "over the ranks", NUMBER, "lower"),
    Column("local_loss_worst", "Local loss, worst", "of the ranks", NUMBER, "lower"),
)  # fmt: skip
"""The columns of all values that rows have."""


def text_columns(rows: Sequence[Row]) -> tuple[list[Column], list[Column]]:
    """Return the columns of the settings in which the rows differ, and those of what was tuned."""
    settings = [Column(name, SETTINGS[name]) for name in varying(rows, list(SETTINGS)) if name != "topology"]
    tuned = dict.fromkeys(row.tuning.parameter for row in rows if row.tuning is not None)
    return settings, [Column(name, name) for name in tuned]


def columns(document: Document) -> list[Column]:
    """Return the columns of the values that any row has, the deciding ones first."""
    rows, metric = document.rows, document.metric.name
    present = [column for column in COLUMNS if any(row.values.get(column.name) is not None for row in rows)]
    if same_steps(rows) is not None:
        present = [column for column in present if column.name != "steps"]
    first = [f"averaged_{metric}", TO_ALL_REDUCE[metric], *_COSTS, "averaged_loss", "local_accuracy_worst"]
    return sorted(present, key=lambda column: first.index(column.name) if column.name in first else len(first))


def same_steps(rows: Sequence[Row]) -> str | None:
    """Return the number of steps if all rows that have one agree, so that no column is needed; otherwise None."""
    means = {mean for row in rows if (mean := row.mean("steps")) is not None}
    return NUMBER.text(means.pop()) if len(means) == 1 else None


def best(rows: Sequence[Row], column: Column) -> set[int]:
    """Return the indices of the best rows among those with the same number of ranks, partition and condition.

    If all rows of a group are equal, or there is only one, none is best.
    """
    groups: dict[tuple[str | None, ...], dict[int, float]] = {}
    for index, row in enumerate(rows):
        mean = row.mean(column.name)
        if column.better is not None and mean is not None and row.method in column.among:
            groups.setdefault(tuple(setting(row, name) for name in DIVIDING), {})[index] = mean
    found: set[int] = set()
    for means in groups.values():
        if len(set(means.values())) > 1:
            extreme = max(means.values()) if column.better == "higher" else min(means.values())
            found.update(index for index, mean in means.items() if mean == extreme)
    return found


def render_page(document: Document) -> str:
    """Return the page as self-contained HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # A label may wrap after an underscore and before a bracket.
    environment.filters["breakable"] = lambda label: Markup(re.sub(r"(?<=_)(?=.)|(?=\()", "<wbr>", escape(label)))
    divided = panels(document.rows)
    every = [series for panel in divided for series in panel.series]
    drawn = draw_charts(document, divided)
    return environment.get_template("report.html.jinja").render(
        document=document,
        asset=lambda *place: Markup(_asset(*place)),
        sentences=list(verdict(document)),
        table=_table(document),
        is_number=lambda column: "number" if column.quantity or column.name == "world_size" else None,
        nothing=_NOTHING,
        drawn=drawn,
        num_panels=len(divided),
        legend=legend_of(every, drawn),
        chart_data=pack(chart_data(every, drawn)) if drawn else "",
        libraries=pack(";\n".join(_asset("vendored", name) for name in _LIBRARIES)) if drawn else "",
        common=_common(document),
        cluster={
            name: f"{value:g}" if isinstance(value, float) else value
            for name, value in document.cluster.items()
            if name != "description" and value is not None
        },
        cluster_sentence=document.cluster.get("description"),
    )


def pack(text: str) -> str:
    """Compress a text to a third, as characters that are safe in a script; charts.js reverses it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _asset(*place: str) -> str:
    return files(__package__).joinpath(*place).read_text(encoding="utf-8")


def _table(document: Document) -> dict[str, Any]:
    """Return the columns, one line per row, and the settings by which rows are chosen.

    First come the columns that decide, which are shown; the others are chosen on the page.
    """
    rows, values = document.rows, columns(document)
    settings, tuned = text_columns(rows)
    num_first = max(_NUM_SHOWN - len(tuned), 0)
    every = [*values[:num_first], *tuned, *settings, *values[num_first:]]
    stars = [(column, best(rows, column)) for column in every]
    chosen = {name: [setting(row, name) or _NOTHING for row in rows] for name in (*SETTINGS, "status")}
    filters = [
        (name, SETTINGS.get(name, "Status"), list(dict.fromkeys(chosen[name])))
        for name in [*varying(rows, list(SETTINGS)), "status"]
    ]
    lines = []
    for index, row in enumerate(rows):
        own = {name: texts[index] for name, texts in chosen.items()}
        lines.append({
            "row": row,
            "cells": [_cell(column, row, index in starred) for column, starred in stars],
            "settings": own,
            "searched": " ".join([row.label, *own.values(), *row.reasons]).lower(),
            # These remain visible when the table is scrolled.
            "facts": [fact for column in settings if (fact := told(row, column.name))],
        })  # fmt: skip
    return {
        "columns": every,
        "num_shown": len([*values[:num_first], *tuned]),
        "lines": lines,
        "filters": [each for each in filters if len(each[2]) > 1],
        "has_values": any(value is not None for row in rows for value in row.values.values()),
    }


def _cell(column: Column, row: Row, is_best: bool) -> dict[str, Any]:
    """Return a cell of the table; the page sorts by its key, which is None if there is nothing to show."""
    text, value = column.text(row), row.values.get(column.name)
    if column.quantity is None or value is None:
        return {"text": text, "key": text, "note": None, "is_best": False}
    note = None if value.count == len(row.seeds) else f"mean of {value.count} of {len(row.seeds)} seeds"
    return {"text": text, "key": repr(value.mean), "note": note, "is_best": is_best}


def _common(document: Document) -> dict[str, str]:
    """Return what all rows have in common, by its name."""
    rows, metric = document.rows, document.metric
    differing = varying(rows, list(SETTINGS))
    common = dict(document.settings)
    for name, title in SETTINGS.items():
        if name not in differing and (texts := {setting(row, name) for row in rows} - {None}):
            common.setdefault(title.lower(), str(texts.pop()))
    if (steps := same_steps(rows)) is not None:
        common.setdefault("steps", steps)
    seeds = {row.seeds for row in rows}
    if len(seeds) == 1 and (shared := seeds.pop()):
        common.setdefault("seeds", ", ".join(map(str, shared)))
    common.setdefault("metric", f"{metric.name}, {'higher' if metric.higher_is_better else 'lower'} is better")
    if metric.target is not None:
        common.setdefault("target", RESULTS[metric.name].text(metric.target))
    return common


class Drawn(NamedTuple):
    """A chart with its axes, and the panels in which there is anything to draw."""

    chart: Chart
    x: Scale
    y: Scale
    panels: tuple[Panel, ...]

    def beyond(self, panel: Panel) -> list[str]:
        """Return the ends of a panel's rows that lie beyond the axes, in words."""
        ends = [(series.name, self.chart.end(series.row)) for series in panel.series]
        return [end.words(name) for name, end in ends if end is not None and not end.is_within(self.x, self.y)]


def draw_charts(document: Document, divided: Sequence[Panel]) -> list[Drawn]:
    """Return the charts in which there is anything to draw."""
    drawn = []
    for chart in charts(document):
        if (scales := chart.scales(document.rows)) is not None:
            members = (panel for panel in divided if any(chart.end(series.row) for series in panel.series))
            drawn.append(Drawn(chart, *scales, tuple(members)))
    return drawn


def legend_of(every: Sequence[Series], drawn: Sequence[Drawn]) -> dict[str, list[Series]]:
    """Return the rows that an entry of the legend controls, by their name, which they share with their style."""
    entries: dict[str, list[Series]] = {}
    for series in every:
        if any(each.chart.end(series.row) for each in drawn):
            entries.setdefault(series.name, []).append(series)
    return entries


def chart_data(every: Sequence[Series], drawn: Sequence[Drawn]) -> str:
    """Return the data of the charts as JSON, with each curve and each chart specification once."""
    # Baselines come last, so that they are drawn on top of the rows that are compared with them.
    in_order = sorted(every, key=lambda series: series.row.method != "gossip")
    data = {
        "config": CONFIG,
        "curves": make_curves(in_order),
        "charts": [
            {
                "identifier": each.chart.identifier,
                "spec": make_spec(each.chart, every, each.x, each.y),
                "ends": make_ends(each.chart, in_order, each.x, each.y),
                "panels": [
                    {
                        "description": f"{', '.join(filter(None, (each.chart.title, panel.title)))}: "
                        f"{each.chart.y_title} against {each.chart.x_title}. The table has the numbers at the end of "
                        "each line.",
                        "rows": [series.index for series in panel.series],
                    }
                    for panel in each.panels
                ],
            }
            for each in drawn
        ],
    }
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write_report(document: Document, folder: Path) -> None:
    """Write report.html, results.json, results.md and results.csv of a sweep into a new or an old folder.

    The latter has one line per row: its settings, each value as ``name`` and ``name_spread``, seeds and commands. If a
    value has an interval, its ends are ``name_low`` and ``name_high``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE_FILE).write_text(render_page(document), encoding="utf-8")
    (folder / DOCUMENT_FILE).write_text(document.model_dump_json(indent=1, exclude_unset=True) + "\n", encoding="utf-8")
    (folder / MARKDOWN_FILE).write_text(markdown(document), encoding="utf-8")
    lines = list(map(_cells, document.rows))
    with (folder / TABLE_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line), restval="")
        writer.writeheader()
        writer.writerows(lines)


def _cells(row: Row) -> dict[str, Any]:
    """Return the cells of a row by column; None stands for an empty cell."""
    cells: dict[str, Any] = {name: getattr(row, name) for name in (*Setting.model_fields, "num_failed", "status")}
    for column in COLUMNS:
        name, value = column.name, row.values.get(column.name)
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


def verdict(document: Document) -> Iterator[str]:
    """Yield the sentences in the order of the rows; none if no gossip row is compared with all-reduce."""
    metric = document.metric
    name = TO_ALL_REDUCE[metric.name]
    column = next((each for each in columns(document) if each.name == name), None)
    if column is None:
        return
    winners = best(document.rows, column)
    for panel in panels(document.rows):
        compared = [each for each in panel.series if each.row.method == "gossip" and each.row.mean(name) is not None]
        if not compared:
            continue
        # Among equal rows, choose the one that sends the least.
        found = [each for each in compared if each.index in winners] or compared
        chosen = min(found, key=lambda each: each.row.mean("bytes_per_step") or 0.0)
        value = chosen.row.values[name]
        assert value is not None
        place = ", ".join(filter(None, [panel.title, f"best of {len(compared)}" if len(compared) > 1 else ""]))
        parts = [chosen.name, _result(chosen.row, metric), _difference(value, metric)]
        reference = next((each.row for each in panel.series if each.row.method == "ddp"), None)
        text = f"{': '.join(filter(None, [place, ', '.join(filter(None, parts))]))}.{_costs(chosen.row, reference)}"
        yield text[0].upper() + text[1:] if place else text


def _result(row: Row, metric: Metric) -> str | None:
    if (mean := row.mean(f"averaged_{metric.name}")) is None:
        return None
    return f"{100 * mean:.1f} %" if metric.name == "accuracy" else f"loss {RESULTS[metric.name].text(mean)}"


def _difference(value: Value, metric: Metric) -> str:
    """Return a difference in words: in points of accuracy, or in percent of all-reduce's loss."""
    is_accuracy = metric.name == "accuracy"
    mean, *ends = (each if is_accuracy else 100 * (each - 1) for each in (value.mean, *(value.interval or ())))
    decimals = 1 if abs(mean) >= 1 else 2
    size = f"{abs(mean):.{decimals}f} {'points' if is_accuracy else '%'}"
    text = f"{size} {'above' if mean > 0 else 'below'} all-reduce" if mean else "the same as all-reduce"
    if not ends or value.count < FEWEST_SEEDS:
        return f"{text} ({'only one seed' if value.count == 1 else f'{value.count} seeds: no interval'})"
    low, high = ends
    if low == high:
        return f"{text} (the same with all {value.count} seeds)"
    if low <= 0 <= high:
        found = "no significant difference"
    else:
        found = f"significantly {'better' if (low > 0) == is_accuracy else 'worse'}"
    return f"{text} (95 % interval {low:+.{decimals}f} to {high:+.{decimals}f}; {found})"


def _costs(row: Row, reference: Row | None) -> str:
    if reference is None:
        return ""
    parts = []
    own, other = row.mean("bytes_per_step"), reference.mean("bytes_per_step")
    if own is not None and other:
        parts.append(f"it sends {BYTES.text(own)} per step, {own / other:.2f} times as much as all-reduce")
    for name, what in (
        ("predicted_time_to_target_s", "the target is predicted after"),
        ("predicted_step_time_s", "a step is predicted to take"),
    ):
        own, other = row.mean(name), reference.mean(name)
        if own is not None and other is not None:
            parts.append(f"{what} {SECONDS.text(own)}, all-reduce's {SECONDS.text(other)}")
            break
    text = "; ".join(parts)
    return f" {text[0].upper()}{text[1:]}." if text else ""

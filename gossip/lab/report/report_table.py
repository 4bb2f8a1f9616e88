"""The results table of the page: one ``tbody`` per row, with its line and the collapsible details below it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gossip.lab.report.columns import Column, best, columns, num_deciding
from gossip.lab.report.markup import Element, element, extend
from gossip.lab.report.report_document import Document, Row, Setting
from gossip.lab.report.series import setting, varying

SETTINGS = {
    name: "Ranks" if name == "world_size" else name.capitalize()
    for name in Setting.model_fields
    if name not in ("label", "method")
}
#: The first column, the label, shows this setting already, with its options.
_IN_LABEL = "topology"
_OUTCOMES = ("Tuned", "Bars")
"""The columns that describe the outcome of a row in words."""
_NOTHING = "–"  # noqa: RUF001
_LONGEST_REASON = 160


def make_filters(document: Document) -> Element:
    """Make the row filters: a text search, and one selection list for each setting in which the rows differ."""
    controls = [
        element(
            "label", element("span", "Search"), element("input", type="search", id="filter-text", autocomplete="off")
        )
    ]
    for name in [*varying(document.rows, list(SETTINGS)), "status"]:
        texts = list(dict.fromkeys(setting_text(row, name) for row in document.rows))
        if len(texts) > 1:
            title = SETTINGS.get(name, "Status")
            choices = [element("option", "all", value=""), *(element("option", text, value=text) for text in texts)]
            select = element("select", *choices, data_setting=name.replace("_", "-"))
            controls.append(element("label", element("span", title), select))
    return element(
        "form", *controls, element("button", "Show all", type="reset"), class_="filters", id="filters", role="search",
        aria_label="Filter the rows",
    )  # fmt: skip


def make_table(document: Document) -> Element:
    """Make the table in its scrolling container: first the labels, then the deciding values, then everything else."""
    rows = document.rows
    settings = [name for name in varying(rows, list(SETTINGS)) if name != _IN_LABEL]
    values = columns(rows, document.metric)
    outcomes = [name for name in _OUTCOMES if any(_outcome(row, name) for row in rows)]
    stars = [best(rows, column) for column in values]
    num_first = num_deciding(values, document.metric)
    of_values = [_header(column.title, column.explanation, is_number=True) for column in values]
    head = element("tr", _header("Setting", "", is_number=False), *of_values[:num_first])
    extend(head, *(_header(SETTINGS[name], "", is_number=name == "world_size") for name in settings))
    extend(head, *(_header(title, "", is_number=False) for title in outcomes), *of_values[num_first:])
    table = element(
        "table", element("caption", "Results; the headings sort", class_="hidden-text"), element("thead", head),
        id="results-table",
    )  # fmt: skip
    for index, row in enumerate(rows):
        of_values = [_value_cell(row, column, index in starred) for column, starred in zip(values, stars, strict=True)]
        cells = [_label_cell(row, settings, f"details-{index}"), *of_values[:num_first]]
        for name in settings:
            text = setting_text(row, name)
            cells.append(element("td", text, class_="number" if name == "world_size" else None, data_value=text))
        cells += [
            element("td", _outcome(row, name) or _NOTHING, data_value=_outcome(row, name) or None) for name in outcomes
        ]
        table.append(_body(index, row, [*cells, *of_values[num_first:]]))
    return element(
        "div", table, class_="scroller", tabindex="0", role="region", aria_label="Table of results, scrolls sideways"
    )


def setting_text(row: Row, name: str) -> str:
    """Return a setting as the table and the filters show it."""
    return setting(row, name) or _NOTHING


def _header(title: str, explanation: str, *, is_number: bool) -> Element:
    button = element("button", element("span", title), type="button", data_sort="number" if is_number else "text")
    if explanation:
        button.append(element("small", explanation))
    return element("th", button, scope="col", aria_sort="none", class_="number" if is_number else None)


def _body(index: int, row: Row, cells: Sequence[Element]) -> Element:
    line = element("tr", *cells)
    details = element("tr", element("td", _details(row), colspan=str(len(line))), id=f"details-{index}", hidden=True)
    chosen = {f"data_{name}": setting_text(row, name) for name in (*SETTINGS, "status")}
    searched = " ".join([row.label, *chosen.values(), *row.reasons]).lower()
    return element("tbody", line, details, data_row=str(index), data_text=searched, **chosen)


def _label_cell(row: Row, settings: Sequence[str], details: str) -> Element:
    toggle = element(
        "button", type="button", class_="toggle", aria_expanded="false", aria_controls=details,
        aria_label=f"Commands of {row.label}", title="Commands",
    )  # fmt: skip
    label = element("span", *_breakable(row.label), class_="label")
    what = element("div", label)
    if facts := ", ".join(_facts(row, settings)):
        extend(what, " ", element("span", facts, class_="facts"))
    cell = element("th", element("div", toggle, what, class_="name"), scope="row", data_value=row.label)
    if row.status != "completed":
        cell.append(element("span", row.status, class_="status"))
        if row.reasons:
            reason, *others = row.reasons
            short = reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…"
            more = f" (and {len(others)} more)" if others else ""
            cell.append(element("span", short + more, class_="reason"))
    return cell


def _facts(row: Row, settings: Sequence[str]) -> Iterator[str]:
    """Yield the settings that distinguish rows of the same label; they remain visible when the table is scrolled."""
    for name in settings:
        text = setting(row, name)
        if name == "world_size":
            yield f"{text} rank{'' if text == '1' else 's'}"
        elif text not in (None, "none"):
            assert text is not None
            yield text


def _breakable(label: str) -> list[Element | str]:
    """Return a label that may wrap after an underscore and before a bracket."""
    first, *others = re.split(r"(?<=_)|(?=\()", label)
    return [first, *(part for other in others for part in (element("wbr"), other))]


def _value_cell(row: Row, column: Column, is_best: bool) -> Element:
    value = row.values.get(column.name)
    if value is None:
        return element("td", element("span", _NOTHING, aria_hidden="true"), _hidden("no value"), class_="number")
    cell = element(
        "td",
        class_="number",
        data_value=repr(value.mean),
        title=None if value.count == len(row.seeds) else f"mean of {value.count} of {len(row.seeds)} seeds",
    )
    if is_best:
        extend(cell, element("span", "★ ", class_="best", aria_hidden="true"), _hidden("best: "))
    return extend(cell, column.quantity.value_text(value))


def _outcome(row: Row, name: str) -> str:
    if name == "Bars":
        return row.verdict
    return "" if row.tuning is None else f"{row.tuning.parameter} {row.tuning.text}"


def _details(row: Row) -> Element:
    details = element("div", class_="details")
    seeds = ", ".join(map(str, row.seeds))
    facts = [f"seeds {seeds}" if len(row.seeds) != 1 else f"seed {seeds}"] if row.seeds else []
    if row.num_failed:
        facts.append(f"{row.num_failed} failed")
    extend(details, element("p", "; ".join([row.label, *facts])))
    for reason in row.reasons:
        extend(details, element("p", reason, class_="reason"))
    if row.tuning is not None:
        tried = "; ".join(trial.text for trial in row.tuning.trials)
        extend(details, element("p", f"{row.tuning.parameter} with seed {row.tuning.seed}: {tried}"))
    if row.bars:
        said = {True: "met", False: "not met", None: "not known"}
        bars = ", ".join(f"{name} {bar.bar:g} {said[bar.met]}" for name, bar in row.bars.items())
        extend(details, element("p", f"bars: {bars}"))
    if not row.commands:
        return extend(details, element("p", "No command was recorded."))
    commands = element("pre", *(element("code", command) for command in row.commands), tabindex="0")
    copy = element("button", "Copy", type="button", class_="copy")
    return extend(details, commands, copy, element("span", class_="copied", role="status"))


def _hidden(text: str) -> Element:
    return element("span", text, class_="hidden-text")

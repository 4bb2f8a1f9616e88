"""The charts of the page with the legend that they share."""

from __future__ import annotations

from collections.abc import Iterator

from gossip.lab.report.charts import Chart, charts, drawable
from gossip.lab.report.markup import Element, element
from gossip.lab.report.plot import describe, draw_mark, draw_panel, undrawn
from gossip.lab.report.report_document import DESCRIPTION, Document
from gossip.lab.report.series import Panel, Series, panels


def make_figures(document: Document) -> Iterator[Element]:
    """The charts with their legend, or that there is nothing to draw."""
    divided = panels(document.rows)
    figures = [figure for chart in charts(document) if (figure := _figure(chart, divided)) is not None]
    if not figures:
        text = "Nothing to draw: no run has left a curve or a result."
        yield element("p", text, class_="nothing")
        return
    text = (
        "Rows that the filters leave out are left out here too. Choose a name to bring it out; in a chart arrow keys "
        "go from mark to mark."
    )
    if DESCRIPTION in document.cluster:
        text += f" Times are predicted for {document.cluster[DESCRIPTION].rstrip('.')}."
    note = element("p", text, class_="note")
    grid = element("div", *figures, class_="figures single" if len(divided) == 1 else "figures")
    drawn = {
        series.index
        for panel in divided
        for series in panel.series
        if any(chart.end(series.row) is not None for chart in charts(document))
    }
    yield from (note, _legend(divided, drawn), grid)


def _figure(chart: Chart, divided: list[Panel]) -> Element | None:
    scales = drawable(chart, divided)
    if scales is None:
        return None
    grid = element("div", class_="panels")
    for number, panel in enumerate(divided):
        if all(chart.end(series.row) is None for series in panel.series):
            continue
        content = [draw_panel(chart, panel, *scales, f"{chart.identifier}-{number}")]
        if panel.title:
            content.insert(0, element("h4", panel.title))
        missing = "; ".join(describe(chart, series) for series in undrawn(chart, panel, *scales))
        text = f"Beyond this axis: {missing}." if missing else ""
        content.append(element("p", text, class_="readout"))
        grid.append(element("div", *content, class_="panel"))
    title = element("h3", chart.title)
    return element("section", title, grid, class_="figure", id=f"chart-{chart.identifier}")


def _legend(divided: list[Panel], drawn: set[int]) -> Element:
    """One entry for each name of which anything is drawn; it belongs to all rows of that name."""
    named: dict[str, list[Series]] = {}
    for panel in divided:
        for series in panel.series:
            if series.index in drawn:
                named.setdefault(series.name, []).append(series)
    legend = element("ul", class_="legend", aria_label="Legend")
    for name, members in named.items():
        style = members[0].style
        line = element("path", class_="line", d="M2 9H38", stroke_dasharray=style.dash or None)
        sample = element("svg", line, draw_mark(members[0], 20.0, 9.0), viewBox="0 0 40 18", aria_hidden="true")
        sample.set("class", f"sample {style.css_class}")
        button = element("button", sample, element("span", name), type="button", aria_pressed="false", data_name=name)
        rows = " ".join(dict.fromkeys(str(series.index) for series in members))
        legend.append(element("li", button, data_rows=rows))
    return legend

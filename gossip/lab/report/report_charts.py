"""The charts of the page: their containers, their common legend, and the data from which the script draws them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from gossip.lab.report.chart_specs import CONFIG, describe, make_curves, make_ends, make_spec
from gossip.lab.report.charts import Chart, beyond, charts
from gossip.lab.report.markup import Element, element, extend, pack
from gossip.lab.report.report_document import DESCRIPTION, Document
from gossip.lab.report.scales import Scale
from gossip.lab.report.series import Panel, Series, panels

DATA = "chart-data"
"""The id of the element that holds the packed data of the charts."""

_TOOLS = {"zoom-in": "Zoom in", "zoom-out": "Zoom out", "reset": "Reset", "svg": "SVG", "png": "PNG"}
_TITLES = {"svg": "Save as SVG", "png": "Save as PNG"}
#: SVG paths of the marker shapes, centred at (20, 9) in a sample of the legend.
_SHAPES = {
    "circle": "M15.6 9a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0 -8.8 0z",
    "square": "M16 5h8v8h-8z",
    "triangle-up": "M20 3.8L25 12.8H15z",
    "diamond": "M20 3.4L24 9L20 14.6L16 9z",
    "cross": "M18.4 4.2h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
}


def make_charts(document: Document) -> Iterator[Element]:
    """Yield the charts with their legend, or a note that there is nothing to draw."""
    divided = panels(document.rows)
    drawn = [
        (chart, scales)
        for chart in charts(document)
        if (scales := chart.scales([series.row for panel in divided for series in panel.series])) is not None
    ]
    if not drawn:
        yield element("p", "Nothing to draw: no run has left a curve or a result.", class_="nothing")
        return
    guide = (
        "What the filters leave out of the table is left out here too. A name in the legend hides or shows its line in "
        "all charts, and brings it out while it is pointed at. Drag a chart to move it; the wheel with Ctrl zooms, as "
        "do the buttons; a double click goes back."
    )
    if DESCRIPTION in document.cluster:
        guide += f" Times are predicted for {document.cluster[DESCRIPTION].rstrip('.')}."
    yield element("p", guide, class_="note")
    yield element("noscript", element("p", "The charts need JavaScript; the table does not.", class_="nothing"))
    yield _legend(
        [series for panel in divided for series in panel.series if any(chart.end(series.row) for chart, _ in drawn)]
    )
    figures = [_figure(chart, divided, *scales) for chart, scales in drawn]
    yield element(
        "div", *figures, class_="figures single" if len(divided) == 1 else "figures", id="figures", aria_busy="true"
    )
    yield element("script", pack(_data(document, divided, drawn)), type="text/plain", id=DATA)


def _figure(chart: Chart, divided: Sequence[Panel], x: Scale, y: Scale) -> Element:
    title = f"{chart.identifier}-title"
    tools = element("div", class_="tools", role="group", aria_labelledby=title)
    for name, text in _TOOLS.items():
        tools.append(element("button", text, type="button", data_tool=name, title=_TITLES.get(name)))
    grid = element("div", class_="panels")
    for panel in _members(chart, divided):
        missing = "; ".join(describe(chart, series) for series in panel.series if beyond(chart, series.row, x, y))
        said = f"Beyond this axis: {missing}." if missing else ""
        content = [element("div", class_="plot"), element("p", said, class_="readout")]
        if panel.title:
            content.insert(0, element("h4", panel.title))
        grid.append(element("div", *content, class_="panel"))
    head = element("div", element("h3", chart.title, id=title), tools, class_="figure-head")
    return element("section", head, grid, class_="figure", id=f"chart-{chart.identifier}")


def _members(chart: Chart, divided: Sequence[Panel]) -> list[Panel]:
    """Return the panels in which there is anything to draw."""
    return [panel for panel in divided if any(chart.end(series.row) for series in panel.series)]


def _legend(drawn: Sequence[Series]) -> Element:
    """Make the legend, with one entry for each drawn name; the entry controls all rows of that name."""
    named: dict[str, list[Series]] = {}
    for series in drawn:
        named.setdefault(series.name, []).append(series)
    legend = element("ul", class_="legend", aria_label="Legend")
    for name, members in named.items():
        style = members[0].style
        dash = " ".join(map(str, style.dash)) or None
        sample = element(
            "svg", viewBox="0 0 40 18", class_="sample", aria_hidden="true", style=f"color: {style.colour}"
        )
        extend(sample, element("path", d="M2 9H38", class_="line", stroke_dasharray=dash))
        extend(sample, element("path", d=_SHAPES[style.shape], class_="mark"))
        button = element("button", sample, element("span", name), type="button", aria_pressed="true", data_name=name)
        rows = " ".join(dict.fromkeys(str(series.index) for series in members))
        legend.append(element("li", button, data_rows=rows))
    return extend(legend, element("li", element("button", "Hide all", type="button", id="toggle-all")))


def _data(document: Document, divided: Sequence[Panel], drawn: Sequence[tuple[Chart, tuple[Scale, Scale]]]) -> str:
    """Return the data of the charts as JSON, with each curve and each chart specification once."""
    # Baselines come last, so that they are drawn on top of the rows that are compared with them.
    every = sorted(
        {series.index: series for panel in divided for series in panel.series}.values(),
        key=lambda series: series.row.method != "gossip",
    )
    data = {
        "title": document.title,
        "config": CONFIG,
        "curves": make_curves(document.rows, {series.index: series.name for series in every}),
        "charts": [
            {
                "identifier": chart.identifier,
                "title": chart.title,
                "spec": make_spec(chart, divided, x, y),
                "ends": make_ends(chart, every, x, y),
                "panels": [
                    {
                        "title": panel.title,
                        "description": f"{', '.join(filter(None, (chart.title, panel.title)))}: {chart.y_title} "
                        f"against {chart.x_title}. The table has the numbers at the end of each line.",
                        "rows": [series.index for series in panel.series],
                    }
                    for panel in _members(chart, divided)
                ],
            }
            for chart, (x, y) in drawn
        ],
    }
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

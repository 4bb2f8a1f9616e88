"""The whole page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files

from gossip.experiments.report.charts import Chart, charts, drawable
from gossip.experiments.report.columns import same_steps
from gossip.experiments.report.document import Document
from gossip.experiments.report.markup import Element, element, extend, html
from gossip.experiments.report.pictures import picture_url
from gossip.experiments.report.plot import draw_mark, draw_panel, undrawn
from gossip.experiments.report.series import Panel, Series, panels, varying
from gossip.experiments.report.table import SETTINGS, make_filters, make_table, setting_text

_MOST_DRAWINGS = 6
_DESCRIPTION = "description"
_CLUSTER = {
    "num_nodes": "nodes",
    "local_size": "ranks per node",
    "latency_us": "latency, µs",
    "bandwidth_gbps": "bandwidth, Gbit/s",
}
#: Nothing is loaded, whatever a document brings along; form targets are none.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; form-action 'none'"


def render_page(document: Document) -> str:
    """Return the page as HTML that needs nothing else."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{document.title}: sweep"),
        element("style", _asset("report.css")),
    )
    main = element("main", *_sections(document), id="content")
    body = element(
        "body",
        element("a", "Skip to the results", href="#results-title", class_="skip"),
        _header(document),
        main,
        element("script", _asset("report.js")),
    )
    return "<!DOCTYPE html>\n" + html(element("html", head, body, lang="en")) + "\n"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _header(document: Document) -> Element:
    header = element("header", element("h1", document.title))
    if document.description:
        extend(header, element("p", document.description))
    return extend(header, element("p", _summary(document), class_="summary"))


def _summary(document: Document) -> str:
    """How much was run, and how much of it failed."""
    num_runs = sum(len(row.seeds) for row in document.rows)
    num_failed = sum(row.num_failed for row in document.rows)
    settings = _counted(len(document.rows), "setting")
    return f"{settings}, {_counted(num_runs, 'run')}, {num_failed or 'none'} failed."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _sections(document: Document) -> Iterator[Element]:
    if document.rows:
        yield _results(document)
        yield from _charts(document)
    else:
        text = "The sweep has no rows: nothing was run, or no run left anything."
        yield _section("results", "Results", element("p", text, class_="nothing"))
    if document.drawings:
        yield _section("topologies", "Topologies", *_drawings(document.drawings))
    yield _section("settings", "Settings", *_settings(document))
    yield _section("reproduce", "Reproduce", *_reproduce(document))


def _section(identifier: str, title: str, *content: Element | str) -> Element:
    heading = element("h2", title, id=f"{identifier}-title", tabindex="-1")
    return element("section", heading, *content, id=identifier, aria_labelledby=f"{identifier}-title")


def _results(document: Document) -> Element:
    total = len(document.rows)
    count = element("p", _counted(total, "row"), id="count", role="status", aria_live="polite", data_total=str(total))
    legend = (
        "Mean ± sample standard deviation over the seeds. ★ is the best among the rows with as many ranks and the "
        "same partition; what is sent and how long it takes is compared among rows that communicate, consensus "
        "among gossip rows. – means not reached or not measured."  # noqa: RUF001
    )
    nothing = element("p", "No row fits the filters.", id="no-rows", class_="nothing", hidden=True)
    note = element("p", legend, class_="note")
    return _section("results", "Results", make_filters(document), count, make_table(document), nothing, note)


def _charts(document: Document) -> Iterator[Element]:
    divided = panels(document.rows)
    figures = [figure for chart in charts(document) if (figure := _figure(chart, divided)) is not None]
    if not figures:
        text = "Nothing to draw: no run has left a curve or a result."
        yield _section("charts", "Charts", element("p", text, class_="nothing"))
        return
    text = (
        "Rows that the filters leave out are left out here too. Choose a name to bring it out; in a chart arrow keys "
        "go from mark to mark."
    )
    if _DESCRIPTION in document.cluster:
        text += f" Times are predicted for {document.cluster[_DESCRIPTION]}."
    note = element("p", text, class_="note")
    grid = element("div", *figures, class_="figures single" if len(divided) == 1 else "figures")
    yield _section("charts", "Charts", note, _legend(divided), grid)


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
        missing = undrawn(chart, panel, *scales)
        if missing:
            text = f"At zero, which this axis cannot show: {', '.join(series.name for series in missing)}."
            content.append(element("p", text, class_="note"))
        content.append(element("p", class_="readout", aria_hidden="true"))
        grid.append(element("div", *content, class_="panel"))
    title = element("h3", chart.title)
    return element("section", title, grid, class_="figure", id=f"chart-{chart.identifier}")


def _legend(divided: list[Panel]) -> Element:
    """One entry for each name; it belongs to all rows of that name."""
    named: dict[str, list[Series]] = {}
    for panel in divided:
        for series in panel.series:
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


def _drawings(drawings: Mapping[str, str]) -> Iterator[Element]:
    """A gallery; of many one for each number of ranks, or whatever else stands last in the titles."""
    groups: dict[str, list[Element]] = {}
    for title, svg in drawings.items():
        picture = element("img", src=picture_url(svg), alt=f"Drawing of {title}")
        figure = element("figure", picture, element("figcaption", title))
        groups.setdefault(title.rpartition(", ")[2], []).append(figure)
    if len(drawings) <= _MOST_DRAWINGS or len(groups) == 1:
        yield element("div", *(figure for figures in groups.values() for figure in figures), class_="gallery")
        return
    for number, (group, figures) in enumerate(groups.items()):
        gallery = element("div", *figures, class_="gallery")
        yield element("details", element("summary", group), gallery, open=number == 0)


def _settings(document: Document) -> Iterator[Element]:
    rows = document.rows
    differing = varying(rows, list(SETTINGS))
    common = dict(document.settings)
    for name, title in SETTINGS.items():
        texts = {setting_text(row, name) for row in rows if getattr(row, name) is not None}
        if name not in differing and texts:
            common.setdefault(title.lower(), texts.pop())
    steps = same_steps(rows)
    if steps is not None:
        common.setdefault("steps", steps)
    seeds = {row.seeds for row in rows}
    if len(seeds) == 1 and (shared := seeds.pop()):
        common.setdefault("seeds", ", ".join(map(str, shared)))
    metric = document.metric
    target = "" if metric.target is None else f"; target {metric.target:g}"
    common.setdefault("metric", f"{metric.name}, {'higher' if metric.higher_is_better else 'lower'} is better{target}")
    yield from _described("Common to all rows", common)
    cluster = {_CLUSTER.get(name, name): text for name, text in document.cluster.items()}
    yield from _described("Cluster for which times are predicted", cluster)


def _reproduce(document: Document) -> Iterator[Element]:
    text = "The commands of a row, one for each seed, unfold in the table beside its name."
    yield element("p", text) if document.rows else element("p", "There are no commands without rows.")
    files_ = element("p", "The numbers of this page: ")
    extend(files_, element("a", "results.csv", href="results.csv"), " (one line per row) and ")
    yield extend(files_, element("a", "results.json", href="results.json"), " (everything, with the curves).")
    yield from _described("Environment", document.environment)


def _described(title: str, texts: Mapping[str, str]) -> Iterator[Element]:
    if texts:
        pairs = [element("div", element("dt", name), element("dd", text)) for name, text in texts.items()]
        yield element("h3", title)
        yield element("dl", *pairs)

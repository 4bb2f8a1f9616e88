"""The HTML page of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files

from gossip.lab.report.charts import quantity_of
from gossip.lab.report.columns import same_steps
from gossip.lab.report.markup import Element, element, extend, html, pack
from gossip.lab.report.report_charts import DATA, make_charts
from gossip.lab.report.report_document import DESCRIPTION, Document
from gossip.lab.report.report_pictures import make_gallery
from gossip.lab.report.report_table import SETTINGS, make_filters, make_table, setting_text
from gossip.lab.report.series import varying
from gossip.lab.report.verdict import verdict

_CLUSTER = {
    "num_nodes": "nodes",
    "local_size": "ranks per node",
    "latency_us": "latency, µs",
    "bandwidth_gbps": "bandwidth, Gbit/s",
    "local_latency_us": "latency within a node, µs",
    "local_bandwidth_gbps": "bandwidth within a node, Gbit/s",
    "compute_us_per_sample": "computation per sample, µs",
}
#: The libraries with which charts.js draws, in the order of their dependencies.
_LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
#: The content security policy: nothing is loaded, whatever a document contains, and no form can be submitted.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob:; form-action 'none'"


def render_page(document: Document) -> str:
    """Return the page as self-contained HTML."""
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
    has_charts = main.find(f".//*[@id='{DATA}']") is not None
    body = element(
        "body",
        element("a", "Skip to the results", href="#results-title", class_="skip"),
        _header(document),
        main,
        element("script", _asset("unpack.js")),
        element("script", _asset("report.js")),
        *(_drawing() if has_charts else ()),
    )
    return "<!DOCTYPE html>\n" + html(element("html", head, body, lang="en")) + "\n"


def _asset(*place: str) -> str:
    return files(__package__).joinpath(*place).read_text(encoding="utf-8")


def _drawing() -> Iterator[Element]:
    """Yield the scripts that draw the charts: the packed libraries with their licences, and charts.js."""
    libraries = ";\n".join(_asset("vendored", name) for name in _LIBRARIES)
    yield element("script", _asset("vendored", "LICENSES.txt"), type="text/plain")
    yield element("script", pack(libraries), type="text/plain", id="libraries")
    yield element("script", _asset("charts.js"))


def _header(document: Document) -> Element:
    header = element("header", element("h1", document.title))
    if document.description:
        extend(header, element("p", document.description))
    num_runs = sum(len(row.seeds) for row in document.rows)
    num_failed = sum(row.num_failed for row in document.rows)
    ran = f"{_counted(len(document.rows), 'setting')}, {_counted(num_runs, 'run')}, "
    failed = element("span", f"{num_failed or 'none'} failed", class_="failed" if num_failed else None)
    extend(header, element("p", ran, failed, ".", class_="summary"))
    sentences = [element("li", sentence) for sentence in verdict(document)]
    return extend(header, element("ul", *sentences, class_="verdict")) if sentences else header


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _sections(document: Document) -> Iterator[Element]:
    if document.rows:
        yield _results(document)
        yield _section("charts", "Charts", *make_charts(document))
    else:
        text = "The sweep has no rows: nothing was run, or no run left anything."
        yield _section("results", "Results", element("p", text, class_="nothing"))
    if document.drawings:
        yield _section("topologies", "Topologies", *make_gallery(document.drawings))
    yield _section("settings", "Settings", *_settings(document))
    yield _section("reproduce", "Reproduce", *_reproduce(document))


def _section(identifier: str, title: str, *content: Element | str) -> Element:
    heading = element("h2", title, id=f"{identifier}-title", tabindex="-1")
    return element("section", heading, *content, id=identifier, aria_labelledby=f"{identifier}-title")


def _results(document: Document) -> Element:
    total = len(document.rows)
    count = element("p", _counted(total, "row"), id="count", role="status", aria_live="polite", data_total=str(total))
    legend = (
        "Mean ± sample standard deviation over the seeds; against all-reduce's model the mean over pairs of the same "
        "seed, with its 95 % interval. ★ is the best among the rows with as many ranks and the "
        "same partition and condition; what is sent and how long it takes is compared among rows that communicate, "
        "consensus among gossip rows. – means not reached or not measured."  # noqa: RUF001
    )
    nothing = element("p", "No row fits the filters.", id="no-rows", class_="nothing", hidden=True)
    content = [make_filters(document), count, make_table(document), nothing]
    if any(value is not None for row in document.rows for value in row.values.values()):
        content.append(element("p", legend, class_="note"))
    return _section("results", "Results", *content)


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
    common.setdefault("metric", f"{metric.name}, {'higher' if metric.higher_is_better else 'lower'} is better")
    if metric.target is not None:
        common.setdefault("target", quantity_of(metric).round_text(metric.target))
    yield from _described("Common to all rows", common)
    cluster = {_CLUSTER.get(name, name): text for name, text in document.cluster.items() if name != DESCRIPTION}
    yield from _described("Cluster for which times are predicted", cluster, document.cluster.get(DESCRIPTION))


def _reproduce(document: Document) -> Iterator[Element]:
    text = "The commands of a row, one for each seed, unfold in the table beside its name."
    yield element("p", text if document.rows else "There are no commands without rows.")
    files_ = element("p", "The numbers of this page: ")
    extend(files_, element("a", "results.csv", href="results.csv"), " (one line per row), ")
    extend(files_, element("a", "results.md", href="results.md"), " (the chief ones) and ")
    yield extend(files_, element("a", "results.json", href="results.json"), " (everything, with the curves).")
    yield from _described("Environment", document.environment)


def _described(title: str, texts: Mapping[str, str], sentence: str | None = None) -> Iterator[Element]:
    """Yield a heading with a description list; nothing if there is no text."""
    if texts or sentence:
        yield element("h3", title)
    if sentence:
        yield element("p", sentence)
    if texts:
        yield element("dl", *(element("div", element("dt", name), element("dd", text)) for name, text in texts.items()))

"""The report's page in a real browser."""

import json
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import MARKS, Browser
from report_documents import comparison, document, failed_row, heterogeneity, row, value

pytestmark = browser.IS_DRIVEN

#: The pixels between the margins of A4.
PAPER_WIDTH = 702
AWKWARD = "<img src=x onerror=\"document.title='broken'\">"


def compared(**changes: Any) -> list[dict[str, Any]]:
    """Rows that differ in all that has a column, with all that decides."""
    rows = heterogeneity()["rows"]
    for each in rows:
        each.update(changes)
        if each["method"] != "ddp":
            interval = {"mean": -12.25, "spread": 1.5, "count": 3, "interval": [-16.54, -8.04]}
            each["values"] |= {"average_difference": interval, "loss_ratio": {**interval, "mean": 1.33}}
    return rows


DOCUMENTS = {
    "comparison": comparison(),
    "heterogeneity": heterogeneity(),
    "compared": document(
        [
            each
            for data in ("digits", "my_module:make, model=cnn")
            for each in compared(condition=f"data={data}", curves=None)
        ]
    ),
    "failed": document([failed_row("ring"), failed_row("all-reduce", world_size=25)]),
    "mixed": document(
        [
            row("all-reduce"),
            row("no communication"),
            failed_row("ring"),
            {**row("torus"), "label": AWKWARD * 2, "status": "partly failed", "reasons": [AWKWARD * 9]},
            row("complete", values={**row("complete")["values"], "bytes_to_target": None, "own": value(1e-9, 1e-10)}),
        ],
        settings={"a_very_long_name_" * 8: "a_very_long_value_" * 12},
        title="a_very_long_title_" * 6,
    ),
    "loss": document(
        [row(label) for label in ("ring", "complete", "all-reduce")],
        metric={"name": "loss", "higher_is_better": False, "target": 0.5},
    ),
}

LAYOUT = """(() => {
    const found = [];
    const say = (element) => (element.textContent || element.outerHTML).trim().slice(0, 60);
    const box = (element) => element.getBoundingClientRect();
    const visible = (element) => element.checkVisibility() && box(element).width > 0;
    const apart = (a, b) => a.right <= b.left + 0.5 || b.right <= a.left + 0.5 || a.bottom <= b.top + 0.5 || b.bottom <= a.top + 0.5;
    const width = document.documentElement.scrollWidth;
    if (width > innerWidth) found.push(`the page is ${width} wide`);
    const groups = [...document.querySelectorAll(".plot")].map((plot) => [plot, [...plot.querySelectorAll("text")]]);
    for (const [selector, inner] of [[".filters", "label, button"], [".legend", "li"], ["dl", "div"], ["main", "section > h2, section > p, .panel, .scroller"]])
        for (const container of document.querySelectorAll(selector)) groups.push([container, [...container.querySelectorAll(inner)]]);
    for (const [container, members] of groups) {
        const shown = members.filter(visible);
        shown.forEach((one, index) => {
            const inside = box(container), own = box(one);
            if (own.left < inside.left - 0.5 || own.right > inside.right + 0.5 || own.top < inside.top - 0.5 || own.bottom > inside.bottom + 0.5)
                found.push(`clipped: ${say(one)}`);
            for (const other of shown.slice(index + 1))
                if (!apart(own, box(other))) found.push(`overlap: ${say(one)} and ${say(other)}`);
        });
    }
    for (const cell of document.querySelectorAll("th, td"))
        if (cell.scrollWidth > cell.clientWidth + 1) found.push(`too wide: ${say(cell)}`);
    for (const side of document.querySelectorAll(".panels:has(.panel + .panel)")) {
        const ends = [...side.children].filter(visible).map((panel) => box(panel).right);
        if (ends.length > 1 && Math.max(...ends) < box(side).right - 1) found.push("an empty column beside the charts");
    }
    for (const plot of document.querySelectorAll(".plot")) {
        if (!visible(plot)) continue;
        if (!plot.querySelector("svg .mark-symbol path, svg .mark-rule line[aria-label]")) found.push("an empty chart");
        for (const drawn of plot.querySelectorAll("svg"))
            if (box(drawn).right > box(plot).right + 0.5 || box(drawn).bottom > box(plot).bottom + 0.5)
                found.push("a chart too large");
    }
    return found;
})()"""  # noqa: E501


def labels(page: Browser) -> list[str]:
    """The names of the rows that are shown, in order."""
    selected = "[...document.querySelectorAll('tbody:not([hidden]) .label')].map((label) => label.textContent)"
    return page.evaluate(selected)


def cells(page: Browser, title: str) -> list[float | None]:
    """A column's numbers, in order."""
    return page.evaluate(
        f"""(() => {{
            const header = [...document.querySelectorAll("thead th")].find((th) => th.textContent.startsWith({json.dumps(title)}));
            return [...document.querySelectorAll("tbody:not([hidden])")].map((body) => {{
                const value = body.rows[0].cells[header.cellIndex].dataset.value;
                return value === undefined ? null : Number(value);
            }});
        }})()"""  # noqa: E501
    )


def header(page: Browser, title: str) -> str:
    """A selector of the button that sorts by a column."""
    index = page.evaluate(
        f"[...document.querySelectorAll('thead th')].findIndex((th) => th.textContent.startsWith({json.dumps(title)}))"
    )
    assert index >= 0
    return f"thead th:nth-child({index + 1}) button"


def choose(page: Browser, setting: str, text: str) -> None:
    """Choose an option as a person would, as far as the page can tell."""
    page.evaluate(
        f"""(() => {{
            const select = document.querySelector("select[data-setting={setting}]");
            select.value = {json.dumps(text)};
            select.dispatchEvent(new Event("input", {{ bubbles: true }}));
        }})()"""
    )


def drawn(page: Browser, chart: str = "bytes") -> list[str]:
    """The names of the rows that a chart shows, panel by panel."""
    return page.evaluate(
        f"""[...document.querySelectorAll("#chart-{chart} .panel:not([hidden]) {MARKS}")]
        .map((mark) => mark.getAttribute("aria-label").split(": ")[0])"""
    )


@pytest.mark.parametrize(
    ("name", "width"),
    [("comparison", 1280), ("heterogeneity", 360), ("failed", 360), ("mixed", 1280), ("mixed", 360), ("loss", 1280)],
)
def test_page_is_laid_out_and_silent(name: str, width: int, page: Browser, pages: dict[str, Path]) -> None:
    page.open(pages[name], width=width)
    assert page.evaluate(browser.CHARTS_ARE_DRAWN)  # when it is loaded, and may be printed
    assert page.evaluate(LAYOUT) == []
    assert page.complaints == []
    assert page.requests == [pages[name].as_uri()]
    assert page.evaluate("document.title") == f"{DOCUMENTS[name]['title']}: sweep"


def test_what_decides_is_seen_without_scrolling_and_the_first_column_tells_rows_apart(
    page: Browser, pages: dict[str, Path]
) -> None:
    page.open(pages["compared"], width=1280)
    hidden = """[...document.querySelectorAll("thead th")].filter((th) =>
        th.getBoundingClientRect().right > document.querySelector(".scroller").getBoundingClientRect().right
    ).map((th) => th.querySelector("span").textContent)"""
    assert page.evaluate(hidden) == []
    titles = "[...document.querySelectorAll('thead th:not([hidden]) span')].map((title) => title.textContent)"
    deciding = ["Accuracy", "To all-reduce", "Time to target", "Sent to target", "Step time", "Sent per step"]
    assert page.evaluate(titles) == ["Setting", *deciding, "Loss"]
    page.click(".columns summary")
    box = "[...document.querySelectorAll('.columns label')].find((label) => label.textContent.includes('Algorithm'))"
    page.evaluate(f"{box}.click()")
    assert page.evaluate(titles) == ["Setting", *deciding, "Loss", "Algorithm"]
    assert page.evaluate("document.querySelector('tbody tr').querySelectorAll(':scope > :not([hidden])').length") == 9
    cells = page.evaluate("[...document.querySelectorAll('tbody tr:first-child th')].map((th) => th.textContent)")
    assert len({*cells}) == len(cells) == 84
    assert "ring by_class(2), data=digits, gradient tracking, int8" in cells


@pytest.mark.parametrize("name", ["compared", "mixed"])
def test_nothing_is_cut_on_paper(name: str, page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages[name], width=PAPER_WIDTH)
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        lines = """[...document.querySelectorAll("td.number:not([hidden]):not(:has(.hidden-text))")].map((cell) => {
            const text = document.createRange();
            text.selectNodeContents(cell);
            return text.getClientRects().length;
        })"""
        assert set(page.evaluate(lines)) == {1}
        page.evaluate("document.querySelectorAll('.columns input:not(:checked)').forEach((box) => box.click())")
        outside = """[...document.querySelectorAll("th, td, svg, h3, p, dd, img")].filter((element) =>
            element.checkVisibility() && element.getBoundingClientRect().right > innerWidth + 0.5
        ).map((element) => element.textContent.slice(0, 60))"""
        assert page.evaluate(outside) == []
        broken = """[...document.querySelectorAll("td.number")].flatMap((cell) => {
            const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
            while (walker.nextNode())
                for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
                    const text = document.createRange();
                    text.setStart(walker.currentNode, word.index);
                    text.setEnd(walker.currentNode, word.index + word[0].length);
                    if (text.getClientRects().length > 1 && cell.checkVisibility()) found.push(word[0]);
                }
            return found;
        })"""
        assert page.evaluate(broken) == []
        seen = "[...document.querySelectorAll('{}')].filter((element) => element.checkVisibility()).length"
        assert page.evaluate(seen.format("th, td")) > 50
        assert page.evaluate(seen.format("#filters, .columns, .toggle, .screen")) == 0
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


def test_page_sorts_numbers_with_nothing_last(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["mixed"])
    before = labels(page)
    assert AWKWARD * 2 in before
    assert AWKWARD * 2 in drawn(page)
    button = header(page, "Sent to target")
    for direction in ("ascending", "descending"):
        page.click(button)
        values = cells(page, "Sent to target")
        numbers = [number for number in values if number is not None]
        assert len(numbers) == 3
        assert values == [*sorted(numbers, reverse=direction == "descending"), None, None]
        assert page.evaluate(f"document.querySelector({button!r}).closest('th').getAttribute('aria-sort')") == direction
        assert labels(page)[3:] == [before[2], before[4]]
    page.click(header(page, "Accuracy"))
    assert page.evaluate("document.querySelectorAll('th[aria-sort]:not([aria-sort=none])').length") == 1
    page.evaluate("document.querySelector('thead button').focus()")
    page.press("Enter")
    assert labels(page) == sorted(labels(page))
    assert page.complaints == []


def test_page_filters_and_the_charts_follow(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    count = "document.getElementById('count').textContent"
    assert page.evaluate(count) == "36 rows"
    assert len(drawn(page)) == 36
    page.click("#filter-text")
    page.type("RING")
    assert set(labels(page)) == {"ring"}
    assert page.evaluate(count) == "3 of 36 rows"
    page.wait_for(f"document.querySelectorAll('#chart-time {MARKS}').length === 3")
    assert drawn(page) == drawn(page, "time") == drawn(page, "consensus") == ["ring"] * 3
    choose(page, "world_size", "25")
    assert page.evaluate(count) == "1 of 36 rows"
    titles = "[...document.querySelectorAll('.panel h4')].filter((h) => h.checkVisibility()).map((h) => h.textContent)"
    assert page.evaluate(titles) == ["25 ranks"] * 8  # one panel in each chart
    legend = (
        "[...document.querySelectorAll('.legend li')].filter((li) => li.checkVisibility()).map((li) => li.textContent)"
    )
    assert page.evaluate(legend) == ["ring", "Hide all"]
    assert page.evaluate(LAYOUT) == []
    choose(page, "topology", "torus")
    assert labels(page) == []
    assert page.evaluate(count) == "0 of 36 rows"
    assert page.evaluate("document.getElementById('no-rows').checkVisibility()")
    page.click("#filters button")
    assert page.evaluate("new Promise((resolve) => setTimeout(resolve))") is None
    assert page.evaluate(count) == "36 rows"
    page.wait_for(f"document.querySelectorAll('#chart-time {MARKS}').length === 36")
    assert len(drawn(page)) == 36
    assert page.complaints == []


def test_page_is_operated_by_keyboard(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    active = "document.activeElement"
    page.press("Tab")
    assert page.evaluate(f"{active}.textContent") == "Skip to the results"
    assert page.evaluate(f"{active}.getBoundingClientRect().top >= 0")
    page.press("Enter")
    assert page.evaluate(f"{active}.textContent") == "Results"
    stops = []
    while not page.evaluate(f"{active}.matches('.legend button')"):
        page.press("Tab")
        outline = page.evaluate(f"getComputedStyle({active}).outlineStyle")
        stops.append((page.evaluate(f"{active}.tagName"), outline))
        assert len(stops) < 200
    assert {tag for tag, _ in stops} == {"INPUT", "SELECT", "BUTTON", "DIV", "SUMMARY"}
    assert {outline for _, outline in stops} == {"solid"}
    # A name brings its line out and says where it ends.
    page.evaluate("document.querySelector('.legend li:nth-child(5) button').focus()")
    readouts = "[...document.querySelectorAll('#chart-bytes .readout')].map((readout) => readout.textContent)"
    assert all(text.startswith("ring: 9") and text.endswith(" MiB") for text in page.evaluate(readouts))


def test_page_unfolds_commands(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["mixed"], width=360)
    toggle = "tbody[data-row='2'] .toggle"
    page.evaluate(f'document.querySelector("{toggle}").focus()')
    page.press("Enter")
    assert page.evaluate(f'document.querySelector("{toggle}").getAttribute("aria-expanded")') == "true"
    details = "tbody[data-row='2'] .details"
    assert page.evaluate(f'document.querySelector("{details}").checkVisibility()')
    box = page.evaluate(f'document.querySelector("{details}").getBoundingClientRect().toJSON()')
    assert 0 <= box["left"] < box["right"] <= 360
    commands = f'[...document.querySelectorAll("{details} code")].map((code) => code.textContent)'
    assert page.evaluate(commands) == DOCUMENTS["mixed"]["rows"][2]["commands"]
    page.evaluate(f'document.querySelector("{toggle}").click()')
    assert not page.evaluate(f'document.querySelector("{details}").checkVisibility()')
    assert page.complaints == []

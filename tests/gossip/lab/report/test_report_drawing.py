"""What a reader does with the charts of a report, in a real browser: zoom, hover, legend, dark mode."""

import time
from pathlib import Path
from typing import Any

import browser
from browser import MARKS, Browser
from report_documents import TOPOLOGIES, comparison, document, row

pytestmark = browser.IS_DRIVEN

LABELS = ("all-reduce", *TOPOLOGIES)


def on_other_grids(label: str) -> dict[str, Any]:
    """A row of which results and consensus were never measured at the same step."""
    whole = row(label)
    for name, curve in whole["curves"].items():
        if name not in ("step", "bytes", "time_s"):
            kept = 0 if name.startswith("consensus") else 1
            whole["curves"][name] = [value if index % 3 == kept else None for index, value in enumerate(curve)]
    return whole


DOCUMENTS = {
    "grids": document([on_other_grids(label) for label in ("ring", "all-reduce", "no communication")]),
    "comparison": comparison((16, 25)),
    "ordinary": document([row(label) for label in LABELS if label != "star"]),
}
NUM_NAMES = 12


def ticks(page: Browser, chart: str) -> list[list[str]]:
    """What stands at the axes of each panel."""
    found: list[list[str]] = page.evaluate(
        f"""[...document.querySelectorAll("#chart-{chart} .plot")].map((plot) =>
            [...plot.querySelectorAll(".role-axis-label text")].map((text) => text.textContent).filter(Boolean).sort()
        )"""
    )
    assert all(len(texts) > 4 for texts in found)
    return found


def wait_for_other_ticks(page: Browser, chart: str, before: list[list[str]]) -> list[list[str]]:
    """Wait until all panels have other axes than before, the same in each."""
    deadline = time.monotonic() + browser.ANSWER_TIMEOUT_S
    while (now := ticks(page, chart))[0] == before[0] or any(texts != now[0] for texts in now):
        assert time.monotonic() < deadline, now
    return now


def span(page: Browser) -> float:
    """How many times the largest share of errors at the axis of accuracy is the smallest."""
    selected = "#chart-bytes .panel:not([hidden]) .role-axis-label text[text-anchor=end]"
    texts = page.evaluate(f"[...document.querySelectorAll('{selected}')].map((text) => text.textContent)")
    errors = [100 - float(text) for text in texts if text]
    return max(errors) / min(errors)


def names(page: Browser, chart: str, state: str = "") -> list[str]:
    """The names at the marks of a chart, in order of the legend and without repetition."""
    found = page.evaluate(
        f"""[...document.querySelectorAll("#chart-{chart} {MARKS}{state}")]
        .map((mark) => mark.getAttribute("aria-label").split(": ")[0])"""
    )
    return sorted(set(found))


def test_dragging_moves_every_panel_of_one_chart_until_a_double_click(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    before, others = ticks(page, "bytes"), ticks(page, "time")
    assert len(before) == 2
    described = page.evaluate("document.querySelector('#chart-bytes .plot[role=graphics-document]').ariaLabel")
    assert described.startswith(
        "Accuracy against bytes, 16 ranks: accuracy of the averaged model against sent per rank."
    )
    x, y = page.centre("#chart-bytes .panel:nth-child(2) .plot")
    page.drag(x, y, by=(-60, 50))
    after = wait_for_other_ticks(page, "bytes", before)
    assert ticks(page, "time") == others
    page.double_click(x, y)
    assert wait_for_other_ticks(page, "bytes", after) == before
    assert page.complaints == []


def test_the_wheel_scrolls_the_page_and_zooms_with_ctrl(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    x, y = page.centre("#chart-bytes .plot")
    before, scrolled, factor = ticks(page, "bytes"), page.evaluate("scrollY"), span(page)
    page.wheel(x, y, -120)
    page.wait_for(f"scrollY < {scrolled}")
    assert ticks(page, "bytes") == before
    x, y = page.centre("#chart-bytes .plot")
    scrolled = page.evaluate("scrollY")
    page.wheel(x, y, -300, ctrl=True)
    wait_for_other_ticks(page, "bytes", before)
    assert span(page) < factor
    assert page.evaluate("scrollY") == scrolled
    assert page.evaluate("visualViewport.scale") == 1


def test_pointing_at_a_mark_says_name_mean_spread_and_place(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    tooltip = "document.querySelector('#vg-tooltip-element.visible')"
    page.point(*page.centre("#chart-bytes .plot [aria-label^='ring: ']"))
    page.wait_for(f"{tooltip}?.textContent.includes('ring')")
    text = page.evaluate(f"{tooltip}.textContent")
    assert text == "ringaccuracy of the averaged model96.34 ± 0.21 %sent per rank31.47 MiB"
    assert page.evaluate("document.querySelector('#chart-time .readout').textContent").startswith(
        "ring: 96.34 ± 0.21 %"
    )
    page.wait_for(f"document.querySelectorAll(\"#chart-consensus {MARKS}[opacity='1']\").length === 2")
    assert names(page, "consensus", "[opacity='1']") == ["ring"]
    assert page.evaluate(f"getComputedStyle({tooltip}).backgroundColor") == "rgb(255, 255, 255)"
    page.point(1, 1)
    page.wait_for(f"{tooltip} === null")
    page.wait_for(f"document.querySelectorAll(\"#chart-consensus {MARKS}[opacity='1']\").length === {2 * NUM_NAMES}")
    assert page.evaluate("document.querySelector('#chart-time .readout').textContent") == ""


def test_pointing_anywhere_into_a_chart_says_which_point_is_the_nearest(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["grids"])
    x, y = page.centre("#chart-steps .plot")
    tooltip = "document.querySelector('#vg-tooltip-element.visible')?.textContent"
    for right in range(-120, 121, 60):
        for down in range(-80, 81, 40):
            page.point(1, 1)
            page.wait_for(f"{tooltip} === undefined")
            page.point(x + right, y + down)
            page.wait_for(f"{tooltip}?.includes('accuracy of the averaged model')")
    x, y = page.centre("#chart-bytes .plot [aria-label^='no communication: ']")  # has no points along its level
    page.point(x, y - 5)
    page.wait_for(f"{tooltip}?.startsWith('no communication')")


def test_what_is_too_small_for_a_logarithmic_axis_is_drawn_beyond_its_break(
    page: Browser, pages: dict[str, Path]
) -> None:
    page.open_report(pages["ordinary"])
    plot = "document.querySelector('#chart-consensus .plot')"
    frame = page.evaluate(f"{plot}.querySelector('.background').getBoundingClientRect().bottom")
    mark = page.evaluate(f"{plot}.querySelector('[aria-label^=\"all-reduce: 0 at\"]').getBoundingClientRect().bottom")
    assert mark < frame - 3
    texts = page.evaluate(f"[...{plot}.querySelectorAll('.mark-text text')].map((text) => text.textContent)")
    assert texts.count("\u2248 0") == 1
    assert "At the edge" not in page.evaluate("document.body.innerText")


def test_a_line_connects_what_was_measured_though_something_else_was_measured_between(
    page: Browser, pages: dict[str, Path]
) -> None:
    page.open_report(pages["grids"])
    # What sends nothing is level over bytes.
    for chart, number in {"steps": 3, "time": 3, "loss_bytes": 2, "consensus": 3}.items():
        lines = page.evaluate(
            f"""[...document.querySelectorAll("#chart-{chart} .mark-line path")]
            .map((line) => [line.getAttribute("d").split("L").length, line.getTotalLength()])"""
        )
        assert len(lines) == number
        assert all(points == 15 and length > 50 for points, length in lines), (chart, lines)
    # The band over the seeds.
    assert page.evaluate("document.querySelectorAll('#chart-steps .mark-area path').length") == 3


def test_the_legend_hides_and_shows_in_all_charts(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    every = ["all-reduce", "no communication", *TOPOLOGIES]
    entries = "[...document.querySelectorAll('.legend button[data-name]')]"
    assert page.evaluate(f"{entries}.map((entry) => entry.textContent)") == every
    lines = "document.querySelectorAll('#chart-{} .mark-line path').length"
    before = {chart: page.evaluate(lines.format(chart)) for chart in ("bytes", "time", "consensus")}
    page.evaluate(f"{entries}.find((entry) => entry.dataset.name === 'ring').focus()")
    page.press("Enter")
    page.wait_for(f"{lines.format('consensus')} === {before['consensus'] - 2}")
    for chart, number in before.items():
        assert page.evaluate(lines.format(chart)) == number - 2
        assert names(page, chart) == sorted({*every} - {"ring"})
    pressed = f"{entries}.filter((entry) => entry.ariaPressed === 'false').map((entry) => entry.dataset.name)"
    assert page.evaluate(pressed) == ["ring"]
    page.press(" ")
    page.wait_for(f"{lines.format('consensus')} === {before['consensus']}")
    assert names(page, "time") == sorted(every)
    page.click("#toggle-all")
    page.wait_for(f"{lines.format('consensus')} === 0")
    assert names(page, "bytes") == []
    assert page.evaluate("document.getElementById('toggle-all').textContent") == "Show all"
    page.click(".legend li:nth-child(5) button")
    page.wait_for(f"{lines.format('consensus')} === 2")
    assert names(page, "bytes") == ["ring"]
    page.click("#toggle-all")
    page.wait_for(f"{lines.format('consensus')} === {before['consensus']}")
    assert page.evaluate(pressed) == []


def test_charts_have_the_colours_of_the_scheme_also_when_it_changes(page: Browser, pages: dict[str, Path]) -> None:
    page.open_report(pages["comparison"])
    colours = """[...new Set([...document.querySelectorAll('#chart-time .mark-line path')]
        .map((line) => getComputedStyle(line).stroke))]"""
    light = page.evaluate(colours)
    assert len(light) == 9
    assert "rgb(37, 99, 184)" in light
    page.click(".legend button[data-name=ring]")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait_for(f"!{colours}.includes('rgb(37, 99, 184)')")
    assert not {*page.evaluate(colours)} & {*light}
    assert "rgb(111, 171, 245)" in page.evaluate(colours)
    background = "getComputedStyle(document.querySelector('#chart-time svg')).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 24, 29)"
    assert "ring" not in names(page, "time")
    assert page.complaints == []

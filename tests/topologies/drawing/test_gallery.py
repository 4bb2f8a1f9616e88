"""The page of all families: complete, self-contained, and in a browser without overlap at any width."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import browser
import pytest

import topologies
from topologies import facts_of
from topologies.__main__ import main
from topologies.drawing import gallery
from topologies.drawing.gallery import gallery_page

pytestmark = pytest.mark.xdist_group("gallery")  # what its fixtures make is made once

WORLD_SIZE = 12
XHTML = "{http://www.w3.org/1999/xhtml}"

WIDTHS = (1280, 400)

#: What stands where in the page.
LAYOUT = """(() => {
  const box = element => {
    const {left, top, right, bottom} = element.getBoundingClientRect();
    return [left, top, right, bottom];
  };
  return {
    width: document.documentElement.clientWidth,
    content: document.documentElement.scrollWidth,
    cards: [...document.querySelectorAll(".card")].map(card => ({
      id: card.id,
      box: box(card),
      scroll: card.scrollWidth - card.clientWidth,
      parts: [...card.querySelectorAll("figure, h2, p, dl, dt, dd, ul, li, code")].map(box),
      rows: [...card.children].map(box),
      picture: box(card.querySelector("img")),
    })),
  };
})()"""

Box = tuple[float, float, float, float]


@pytest.fixture(scope="module")
def page() -> str:
    return gallery_page(WORLD_SIZE)


@pytest.fixture(scope="module")
def tree(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page)


def test_there_is_one_card_for_every_family(tree: ElementTree.Element) -> None:
    cards = [card for card in tree.iter(f"{XHTML}article") if card.get("class") == "card"]
    assert [card.get("id") for card in cards] == list(topologies.available())
    for card in cards:
        text = " ".join("".join(card.itertext()).split())
        facts = facts_of(card.get("id", ""))
        for stated in (facts.sizes, facts.degree, facts.period, facts.exact, facts.rate, facts.weights, *facts.sources):
            assert re.sub(r"`", "", stated) in text
        assert len(list(card.iter(f"{XHTML}img"))) == 1


def test_what_is_drawn_is_said(tree: ElementTree.Element) -> None:
    def note(name: str) -> str:
        card = next(card for card in tree.iter(f"{XHTML}article") if card.get("id") == name)
        return "".join(next(p for p in card.iter(f"{XHTML}p") if p.get("class") == "note").itertext())

    assert note("ring") == "Drawn: 12 ranks."
    assert note("hypercube") == "Drawn: 8 ranks (the nearest number to 12 that it serves)."
    assert note("local_global") == "Drawn: 12 ranks, local_size=3."
    assert note("graph").startswith("Drawn: 12 ranks, graph=12 nodes and 22 edges")


def test_figures_are_measured(page: str) -> None:
    measured = topologies.build("ring", WORLD_SIZE).describe()
    assert f"n=12: at most 2 sent, period 1, not exact, SLEM {measured.slem:.3g}" in page
    assert "n=8: at most 1 sent, period 3, exact after 3, beta 0 after 3 rounds" in page
    assert "no period, beta " in page


def test_nothing_is_loaded_and_nothing_runs(page: str, tree: ElementTree.Element) -> None:
    for element in tree.iter():
        tag = element.tag.rpartition("}")[2]
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "metadata")
        for name, value in element.attrib.items():
            attribute = name.rpartition("}")[2]
            assert not attribute.startswith("on")
            if attribute in ("href", "src", "srcset", "data", "action"):
                assert value.startswith(("#", "data:image/svg+xml;base64,")), value
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*[\"']?([^)]*)", page))
    assert "@import" not in page
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) == {"http://www.w3.org/1999/xhtml"}


def test_ids_are_unique_and_every_reference_has_its_target(page: str, tree: ElementTree.Element) -> None:
    ids = [element.get("id") for element in tree.iter() if element.get("id") is not None]
    assert len(set(ids)) == len(ids)
    references = re.findall(r"(?:href=\"|url\()#([^\")]+)", page)
    assert references
    assert set(references) <= set(ids)
    assert {element.get("aria-labelledby") for element in tree.iter() if element.get("aria-labelledby")} <= set(ids)


def test_it_can_be_read_without_seeing(tree: ElementTree.Element) -> None:
    assert tree.get("lang") == "en"
    assert len(list(tree.iter(f"{XHTML}h1"))) == 1
    assert len(list(tree.iter(f"{XHTML}h2"))) == len(topologies.available())
    for picture in tree.iter(f"{XHTML}img"):
        assert "ranks" in picture.get("alt", "")


def test_it_is_small(page: str) -> None:
    assert len(page.encode()) < 100_000 * len(topologies.available())


@pytest.mark.parametrize(("world_size", "message"), [(1, "at least 2, got 1"), (81, "at most 80, got 81")])
def test_other_sizes_are_refused(world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"world_size .*must be {message}"):
        gallery_page(world_size)


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"clone.*pip install '\.\[plot\]'"):
        gallery_page()


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gallery, "available", lambda: ("path", "star"))
    path = tmp_path / "gallery.html"
    assert main(["gallery", "--output", str(path), "--world-size", "5"]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_text(encoding="utf-8") == gallery_page(5)


@pytest.fixture(scope="module")
def layouts(page: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """By the width of the page."""
    if browser.executable() is None:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "gallery.html"
    path.write_text(page, encoding="utf-8")
    found = {}
    with browser.chromium(folder / "profile") as chromium:
        chromium.call("Emulation.setScrollbarsHidden", hidden=True)
        for width in WIDTHS:
            chromium.open(path, width=width)
            found[width] = chromium.evaluate(LAYOUT)
    return found


def overlap(one: Box, other: Box) -> float:
    """How far two boxes reach into each other, in pixels."""
    return min(min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1]))


def inside(inner: Box, outer: Box, *, by: float) -> bool:
    left, top, right, bottom = outer
    return left - by <= inner[0] and top - by <= inner[1] and inner[2] <= right + by and inner[3] <= bottom + by


@pytest.mark.parametrize("width", WIDTHS)
def test_in_a_browser_nothing_overflows_or_overlaps(width: int, layouts: dict[int, dict]) -> None:
    layout = layouts[width]
    assert layout["width"] == width
    assert layout["content"] == width, "the page scrolls sideways"
    cards = layout["cards"]
    assert len(cards) == len(topologies.available())
    columns = {round(card["box"][0]) for card in cards}
    assert len(columns) == (1 if width == 400 else 3)
    for place, card in enumerate(cards):
        assert card["scroll"] == 0, card["id"]
        assert card["box"][2] <= width
        assert inside(card["picture"], card["box"], by=0)
        assert overlap(card["picture"], card["picture"]) > 100, card["id"]  # it is shown
        for other in cards[place + 1 :]:
            assert overlap(card["box"], other["box"]) <= 0, (card["id"], other["id"])
        for part in card["parts"]:
            assert inside(part, card["box"], by=0.5), card["id"]
        for row, box in enumerate(card["rows"]):
            for other in card["rows"][row + 1 :]:
                assert overlap(box, other) <= 0.5, card["id"]
